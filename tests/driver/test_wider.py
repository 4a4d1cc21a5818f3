"""To ask for more never gives a longer step: what only widens a search keeps what was looked at."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.plans.plan import Plan
from tests.grouped import grouped
from tests.planned import hostless


class Net(nn.Module):
    """Wide layers between a table and a head."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                  for _ in range(layers))  # fmt: skip
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def planned(cluster: str, **options: Any) -> Plan:
    with torch.device("meta"):
        model, ids = Net(256, 4, 512), torch.zeros(16, 256, dtype=torch.long)
    return autopar.plan(model, (ids, ids), cluster=hostless(cluster), **options)


TIGHT = 0.6
"""Of the memory that the best plan of all takes: parameters come to the host, or microbatches."""

WIDER: dict[str, Any] = {
    "stages": "auto", "microbatches": "auto", "residency": "auto", "margin": True,
    "mesh": "auto:3", "loss_chunks": "auto",
}  # fmt: skip
"""What only widens what is looked at."""


@cache
def tight(cluster: str) -> int:
    return int(TIGHT * planned(cluster).estimates.memory.total)


@cache
def plan_of(cluster: str, is_tight: bool, asked: tuple[tuple[str, Any], ...]) -> Plan | None:
    """The plan of the options by their flat names; None where nothing fits."""
    given = {"loss_chunks": 1, **dict(asked)}
    if is_tight:
        given["memory_limit"] = tight(cluster)
    try:
        return planned(cluster, **grouped(**given))
    except InfeasibleError:
        return None


def check(
    cluster: str, narrow: dict[str, Any], wider: dict[str, Any], *, is_tight: bool = False
) -> None:
    """A step is no longer, nothing that fits is lost, and what is asked for is there."""
    known = plan_of(cluster, is_tight, tuple(sorted(narrow.items())))
    found = plan_of(cluster, is_tight, tuple(sorted((narrow | wider).items())))
    if known is not None:
        assert found is not None
        assert found.estimates.step_ns <= known.estimates.step_ns
    if found is not None and "margin" in wider:
        assert found.provenance.margin is not None


@pytest.mark.parametrize("cluster", ["4xH100", pytest.param("2x2xL4", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("narrow", "is_tight", "wider"),
    [
        ({}, False, ["stages"]),
        ({"microbatches": 2}, False, ["stages"]),
        ({"mesh": "4"}, False, ["stages"]),
        ({}, True, ["stages"]),
        ({}, True, ["residency"]),
        ({}, False, ["margin"]),
        ({"stages": 2}, False, ["margin"]),
        ({"stages": 2}, True, ["residency", "loss_chunks"]),
        ({}, True, ["margin", "loss_chunks"]),
        ({"microbatches": 1}, False, ["microbatches", "mesh"]),
    ],
    ids=str,
)
def test_what_only_widens_makes_no_step_longer(
    cluster: str, narrow: dict[str, Any], is_tight: bool, wider: list[str]
) -> None:
    check(cluster, narrow, {name: WIDER[name] for name in wider}, is_tight=is_tight)


@pytest.mark.nightly
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_whatever_is_asked_for_beside(data: st.DataObject) -> None:
    cluster = data.draw(st.sampled_from(["4xH100", "2x2xL4"]))
    narrow = {
        name: value
        for name, values in (
            ("stages", [None, 1, 2]), ("microbatches", [None, 1]), ("mesh", [None, "auto:2"]),
        )
        if (value := data.draw(st.sampled_from(values))) is not None
    }  # fmt: skip
    names = [name for name in WIDER if (name, narrow.get(name)) != ("stages", 2)]
    wider = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    is_tight = data.draw(st.booleans())
    check(cluster, narrow, {name: WIDER[name] for name in wider}, is_tight=is_tight)
