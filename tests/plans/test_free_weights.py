"""Strategies leave weights to the solver that they have no rule for, and say which."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UndividedBatchError
from autopar.plans.recorded import options_of
from tests.grouped import grouped

MESHES = {"megatron": "2x2", "ddp": "2", "fsdp": "2x2", "2d": "2x2", "2.5d": "2x2x2", "3d": "2x2x2"}


class Shuffle(nn.Module):
    """A block of ShuffleNet: half of the channels pass, and all are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4),
            nn.ReLU(), nn.Conv2d(4, 4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        both = torch.cat([left, self.branch(right)], 1)
        rows, channels, *size = both.shape
        return both.view(rows, 2, channels // 2, *size).transpose(1, 2).reshape(x.shape)


class Loss(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            made = layer(x)
            x = made[0] if isinstance(made, tuple) else made
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "shuffle": (lambda: Loss(Shuffle(), Shuffle()), (8, 8, 4, 4)),
    "gru": (lambda: Loss(nn.GRU(8, 8, batch_first=True)), (8, 3, 8)),
    "lstm and linear": (
        lambda: Loss(nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)), (8, 3, 8)
    ),
    "depthwise": (lambda: Loss(nn.Conv2d(8, 8, 3, groups=8)), (8, 8, 4, 4)),
    "group norm": (
        lambda: Loss(nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 3)),
        (8, 8, 5),
    ),
    "norm alone": (lambda: Loss(nn.LayerNorm(8)), (8, 8)),
    "1x1, one sample": (
        lambda: Loss(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)), (1, 8, 4, 4)
    ),
}  # fmt: skip

DAILY = {("shuffle", "megatron"), ("gru", "megatron"), ("group norm", "3d")}
CASES = [
    pytest.param(name, strategy, marks=() if (name, strategy) in DAILY else pytest.mark.nightly)
    for name in MODELS
    for strategy in MESHES
    # Of one sample only megatron can be asked, on one axis.
    if name != "1x1, one sample"
]


def made(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make().double(), torch.randn(shape, dtype=torch.float64)


def planned(name: str, strategy: str, mesh: str, **options: Any) -> autopar.Plan:
    num_devices = prod(map(int, mesh.split("x")))
    model, x = made(name)
    return autopar.plan(
        model, x, cluster=f"{num_devices}xcpu", mesh=mesh, **grouped(strategy=strategy, **options)
    )


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_every_strategy_plans_what_eager_computes(name: str, strategy: str) -> None:
    plan = planned(name, strategy, MESHES[strategy])
    autopar.verify(plan, *made(name))


def test_one_sample_is_cut_in_features() -> None:
    plan = planned("1x1, one sample", "megatron", "2")
    autopar.verify(plan, *made("1x1, one sample"))


def free_line(plan: autopar.Plan) -> list[str]:
    return [line for line in plan.provenance.imposed if "no rule for" in line]


def test_the_plan_says_which_weights_are_free() -> None:
    plan = planned("lstm and linear", "megatron", "2")
    (line,) = free_line(plan)
    assert line.startswith("strategy megatron: no rule for layers.*.weight_ih_l0, layers.*.weight_")
    assert "no rule for layers.*.weight_ih_l0" in " ".join(str(plan.summary()).split())
    assert plan.structure.params["layers.1.weight"].choice.storage[0].kind == "S"
    # The line is not taken for something to ask for.
    assert options_of(plan).strategy == "megatron"
    assert not free_line(planned("norm alone", "megatron", "2"))


def test_a_batch_that_does_not_divide_is_told_with_what_works() -> None:
    model, x = nn.Linear(8, 8).double(), torch.randn(3, 8, dtype=torch.float64)

    def plan(rows: Tensor, **options: Any) -> autopar.Plan:
        return autopar.plan(Loss(model), rows, cluster="2xcpu", mesh=2, **grouped(**options))

    with pytest.raises(UndividedBatchError, match="3 samples do not divide by 2: give it") as told:
        plan(x, constraints={"strategy": "fsdp"})
    assert 'pins={"param:*": "S on *", "for_backward:*": "S on *"}' in str(told.value)
    found = plan(x, constraints={"pins": {"param:*": "S on *", "for_backward:*": "S on *"}})
    autopar.verify(found, Loss(model), x)
    with pytest.raises(UndividedBatchError, match="has a dim of several samples"):
        plan(x[:1], constraints={"strategy": "ddp"})
    plan(x[:2], constraints={"strategy": "fsdp"})
