"""Pipelines as they are planned run as they are stored: the names in a plan lead back to what was
planned, tied weights lie alike in their stages, and a step is eager's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import MicrobatchError
from autopar.plans.plan import Plan
from autopar.runtime.process.stage_groups import storage_in_stages
from tests.grouped import grouped
from tests.planned import hostless
from tests.zoo import ZOO

SAMPLES = 8
DIVIDED: dict[str, dict[str, Any]] = {
    "two": {"stages": 2, "microbatches": 2},
    "v": {"stages": 4, "microbatches": 4, "schedule": "zb-v"},
    "megatron": {"stages": 2, "microbatches": 2, "strategy": "megatron"},
    "fsdp": {"stages": 2, "microbatches": 2, "strategy": "fsdp"},
    "memory": {"stages": 2, "microbatches": 2, "residency": "auto"},
}
WHOLE = ("mixtral", "grouped", "resnet", "mobile", "sequence")
"""Models with no microbatches: something in them speaks of the whole batch."""


def planned(name: str, **how: Any) -> tuple[Plan, torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    size = next(iter(inputs.values())).shape[0]
    batch = {k: torch.cat(-(-SAMPLES // size) * [x])[:SAMPLES] for k, x in inputs.items()}
    return (
        autopar.plan(model.train(), batch, cluster=hostless("4xH100"), **grouped(**how)),
        model,
        batch,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "how"), list(product(ZOO, DIVIDED)))
def test_what_is_planned_runs(name: str, how: str) -> None:
    options = DIVIDED[how]
    if name in WHOLE:
        with pytest.raises(MicrobatchError):
            planned(name, **options)
        if options.get("schedule") == "zb-v":
            return
        options = options | {"microbatches": 1}
    found, model, batch = planned(name, **options)
    if how == "memory":
        fullest = max(stage.estimates.memory.total for stage in found.stages)
        found, model, batch = planned(name, **options, memory_limit=int(0.9 * fullest))
    assert len(found.structure.stages) == options["stages"]
    storage_in_stages(found.structure.stages)
    autopar.verify(Plan.from_bytes(found.to_bytes()), model, batch)
