"""What the processes of `test_stages.py` do where stages are taken that nobody asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Cluster, Level, Link
from autopar.runtime.module.module import CompiledModule
from tests.grouped import grouped
from tests.runtime.workers import RANK, distance, most, slow_devices


class Deep(nn.Module):
    """Layers whose weights are far larger than what they hand on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def points(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step))


def slowly_joined() -> Cluster:
    cluster = slow_devices(2)
    return replace(cluster, levels=(Level(2, Link("slow", 2e4, 1e-6, 0.0, "made up")),))


def after(first: Callable[[CompiledModule], object], **how: Any) -> dict[str, Any]:
    """Four steps beside eager's, the last of more rows, after a `first` call; in how many stages
    and microbatches they are."""
    plain = Deep()
    model = autopar.compile(copy.deepcopy(plain), cluster=slowly_joined(), **grouped(**how))
    first(model)
    losses: list[float] = []
    for step in range(4):
        x = points(step, rows=16 if step == 3 else 8)
        ours = model(x.chunk(2)[RANK] if how else x)
        theirs = plain(x)
        ours.backward()
        theirs.backward()
        losses.append(distance(ours, theirs))
    return {
        "loss": max(losses),
        "grad": most(model, plain, "grad"),
        "stages": [len(plan.structure.stages) for plan in model.plans],
        "microbatches": [plan.structure.microbatches for plan in model.plans],
    }


def evaluated(model: CompiledModule) -> None:
    model.eval()
    with torch.no_grad():
        model(points(9))
    model.train()


def unasked() -> dict[str, Any]:
    return {
        "at once": after(lambda _: None),
        "rows of its own": after(lambda _: None, inputs="local"),
    }


def unasked_after_evaluation() -> dict[str, Any]:
    return {"after evaluation": after(evaluated)}
