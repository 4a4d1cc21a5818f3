"""To ask for more never gives a longer step: what only widens a search keeps what was looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.plans.plan import Plan
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


@pytest.mark.parametrize("cluster", ["4xH100", pytest.param("2x2xL4", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("narrow", "wider"),
    [
        ({}, {"pipeline": {"stages": "auto"}}),
        ({"microbatches": 2}, {"pipeline": {"stages": "auto"}}),
        ({"mesh": "4"}, {"pipeline": {"stages": "auto"}}),
        ({"limit": "tight"}, {"pipeline": {"stages": "auto"}}),
        ({"limit": "tight"}, {"residency": "auto"}),
        ({}, {"search": {"margin": True}}),
        ({"limit": "tight"}, {"search": {"margin": True}}),
        ({"microbatches": 1}, {"microbatches": "auto"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_only_widens_makes_no_step_longer(
    cluster: str, narrow: dict[str, Any], wider: dict[str, Any]
) -> None:
    memory: dict[str, Any] = {}
    if "limit" in narrow:
        memory["limit"] = int(TIGHT * planned(cluster).estimates.memory.total)
    asked = {name: value for name, value in narrow.items() if name != "limit"}
    known = planned(cluster, **asked, memory=memory)
    more = {name: value for name, value in wider.items() if name != "residency"}
    found = planned(
        cluster, **asked | more, memory=memory | {"residency": wider.get("residency", "cuda")}
    )
    assert found.estimates.step_ns <= known.estimates.step_ns
