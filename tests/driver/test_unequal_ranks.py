"""Ranks of a pipeline that differ in how many devices they have: chosen where that is better, asked
for, and equal to eager."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.parts import add_up_to, sizes_of_parts
from autopar.errors import ArgumentError, ClusterError, StageError
from autopar.plans.plan import Plan
from autopar.report.pipeline_reasons import pipeline_reasons
from tests.grouped import grouped
from tests.planned import hostless
from tests.zoo import ZOO


class Chain(nn.Module):
    """Layers of these widths, one after the other."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


UNEVEN = (1024, 1024, 8192, 1024, 1024)
"""Two of four layers take most of the time, and cannot be shared but within their stages."""


def chain(devices: int = 8, widths: Sequence[int] = UNEVEN, **how: Any) -> Plan:
    how.setdefault("microbatches", 4)
    return autopar.plan(
        Chain(widths),
        (torch.randn(2048, widths[0]),),
        cluster=hostless(f"{devices}xH100"),
        **grouped(**how),
    )


def placed(plan: Plan) -> list[tuple[int, int]]:
    """The first device of each stage, and how many it has."""
    return [(s.first_rank, s.num_devices) for s in plan.structure.stages]


def test_more_devices_where_there_is_more_to_do() -> None:
    """Four stages of as many devices each wait for the two that have the large layers."""
    equal, found = chain(mesh="2", stages=4), chain(stages=4)
    assert placed(equal) == [(0, 2), (2, 2), (4, 2), (6, 2)]
    sizes = [size for _, size in placed(found)]
    assert sum(sizes) == 8 and max(sizes) == 4
    assert found.estimates.step_ns < 0.97 * equal.estimates.step_ns
    assert sizes.index(4) in (1, 2)
    assert found.to_bytes() == chain(stages=4).to_bytes()
    again = chain(stages=4, mesh="/".join(str(size) for size in sizes))
    assert placed(again) == placed(found)


def test_layers_that_are_alike_have_as_many_devices_each() -> None:
    assert {size for _, size in placed(chain(stages=4, widths=[1024] * 9))} == {2}


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("devices", "stages"), [(8, 3), (4, 3), (8, 5), (6, 4), (3, 2), (5, 2), (7, 3)]
)
def test_any_number_of_stages_shares_the_devices(devices: int, stages: int) -> None:
    plan = chain(devices, [64] * 7, stages=stages)
    taken = [d for first, size in placed(plan) for d in range(first, first + size)]
    assert len(placed(plan)) == stages and sorted(taken) == [*range(devices)]
    assert plan.world_size == devices


def test_what_cannot_be_shared_is_an_error() -> None:
    with pytest.raises(StageError, match="4 devices are not shared by 5 ranks in parts that lie"):
        chain(4, stages=5)
    with pytest.raises(StageError, match=r"8 devices are not shared evenly by 3 ranks: .* 2x2/2/2"):
        chain(stages=3, mesh="2")
    with pytest.raises(StageError, match="'4/2/2' is of 3 ranks, and 2 are asked for"):
        chain(stages=2, mesh="4/2/2")
    with pytest.raises(ClusterError, match="parts of 4, 2 devices are 6, but cluster 8xH100"):
        chain(mesh="4/2")
    with pytest.raises(
        ArgumentError, match=r"'4/4': that is of a pipeline, and pipeline\.stages=1"
    ):
        chain(mesh="4/4", stages=1)


def test_sizes_next_to_an_even_share() -> None:
    for cluster, ranks, sizes in (
        ("8xH100", 4, (4, 2, 1)), ("8xH100", 3, (4, 2, 1)), ("4x8xH100", 4, (16, 8, 4)),
        ("6xH100", 4, (2, 1)), ("3x2xH100", 3, (2, 1)), ("5xH100", 2, (3, 2)),
    ):  # fmt: skip
        assert sizes_of_parts(hostless(cluster), ranks) == sizes
    assert add_up_to(8, 3, (4, 2, 1)) and add_up_to(8, 5, (4, 2, 1))
    assert not add_up_to(8, 1, (4, 2, 1)) and not add_up_to(8, 9, (4, 2, 1))


def test_weights_that_stages_share_are_on_equal_meshes() -> None:
    model, inputs = ZOO["gpt2"]()
    cluster = hostless("4xH100")
    plan = autopar.plan(model, inputs, cluster=cluster, mesh="1/2/1", microbatches=2)
    tied = [s for s in plan.structure.stages if "transformer.wte.weight" in s.params]
    assert len(tied) == 2
    with pytest.raises(StageError, match="stages that share a weight have to be on equal meshes"):
        autopar.plan(model, inputs, cluster=cluster, mesh="2/1/1", microbatches=2)
    # One that is frozen too: stages have it as the first of them stores it.
    model.requires_grad_(False).transformer.ln_f.requires_grad_(True)
    with pytest.raises(StageError, match=r"on meshes dp=2/1/1: stages that share a weight"):
        autopar.plan(model, inputs, cluster=cluster, mesh="2/1/1", microbatches=2)


def test_reasons_for_cuts_of_ranks_that_differ() -> None:
    """Work is what devices do together. Of layers that differ no time is told in another stage, and
    none of like ones where a stage of another size has none of them yet."""
    plan = chain(mesh="4/2/2", widths=[1024] * 10)
    reasons = pipeline_reasons(plan)
    assert reasons.even_ns < plan.estimates.step_ns < 1.5 * reasons.even_ns
    assert reasons.moved and min(each.step_ns for each in reasons.moved) > 0.9 * reasons.step_ns
    assert not pipeline_reasons(chain(mesh="4/2/2")).moved


@pytest.mark.breadth(5)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(
            ("gpt2", "llama"),
            ({"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"schedule": "gpipe"}),
        ),
        # In one microbatch, for its batch norms: GPipe is 1F1B there.
        ("resnet", {"schedule": "1f1b"}),
        ("resnet", {"schedule": "zb-h1"}),
    ],
)
def test_gradients_are_those_of_eager(name: str, how: dict[str, Any]) -> None:
    model, inputs = ZOO[name]()
    count = 1 if name == "resnet" else 2
    mesh = {"gpt2": "1/2/1", "llama": "2/1/1", "resnet": "2x2/2/2"}[name]
    cluster = hostless("8xH100" if name == "resnet" else "4xH100")
    plan = autopar.plan(
        model.train(), inputs, cluster=cluster, mesh=mesh, microbatches=count, **grouped(**how)
    )
    assert len({size for _, size in placed(plan)}) == 2
    autopar.verify(Plan.from_bytes(plan.to_bytes()), model, inputs)
