"""Scripts that draw random numbers beside a compiled model: the processes of `test_seeds.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.module.module import CompiledModule
from autopar.runtime.program.sharded import ShardedOutput
from tests.grouped import grouped
from tests.runtime.workers import RANK, distance

Script = Callable[[nn.Module], list[Tensor]]
"""What a script makes of a model, and trains it by: the losses of its steps."""


class Net(nn.Module):
    """Of layers that draw, with its loss outside: of an output that is whole, or `in_shards` at the
    first call, since there is a loss beside it."""

    def __init__(self, *, in_shards: bool = False) -> None:
        super().__init__()
        self.in_shards = in_shards
        self.a, self.b, self.drop = nn.Linear(6, 16), nn.Linear(16, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        made = self.b(self.drop(self.a(x).relu()))
        return (made.square().mean(), made) if self.in_shards else made


def _output(model: nn.Module, x: Tensor) -> Tensor:
    made = model(x)
    return made[1] if isinstance(made, tuple) else made


def beside_eager(
    script: Script, strategy: str = "fsdp", *, in_shards: bool = False, **how: Any
) -> dict[str, float]:
    """How far a script is on all ranks from where it is on one device, and what comes after it."""
    torch.manual_seed(0)
    plain = Net(in_shards=in_shards)
    model: Any = autopar.compile(copy.deepcopy(plain), **grouped(strategy=strategy, **how))
    torch.manual_seed(3)
    ours = [x.detach() for x in script(model)]
    after = torch.rand(())
    torch.manual_seed(3)
    theirs = [x.detach() for x in script(plain)]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "loss": max(distance(a, b) for a, b in zip(ours, theirs, strict=True)),
        "param": max(distance(p, q) for p, q in pairs),
        "what is drawn next": distance(after, torch.rand(())),
    }


def _trained(
    model: nn.Module, step: Callable[[int, nn.Module], Tensor], num_steps: int = 5
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for k in range(num_steps):
        optimizer.zero_grad()
        losses.append(step(k, model))
        losses[-1].backward()
        optimizer.step()
    return losses


def _drawn(_: int, model: nn.Module) -> Tensor:
    """Batches, times, noise and dropout of the script's own, as a diffusion model's."""
    x = torch.randn(8, 6)
    times, noise = torch.randint(0, 10, (8, 1)) / 10, torch.randn_like(x)
    made = _output(model, times * x + (1 - times) * noise)
    return F.mse_loss(F.dropout(made, 0.2), noise) + 0.01 * torch.rand(()) * made.abs().mean()


def draws() -> dict[str, dict[str, float]]:
    found = {}
    for strategy in ("fsdp", "ddp"):
        for in_shards in (False, True):
            found[f"{strategy} {in_shards}"] = beside_eager(
                lambda model: _trained(model, _drawn), strategy, in_shards=in_shards
            )
    found["by name"] = beside_eager(lambda m: _trained(m, _drawn), inputs={"x": "global"})
    return found


def seeds_between_calls() -> dict[str, float]:
    def step(k: int, model: nn.Module) -> Tensor:
        torch.manual_seed(k // 2)
        return _drawn(k, model)

    return beside_eager(lambda model: _trained(model, step))


def rank_0_alone() -> dict[str, float]:
    """Rank 0 samples a picture between steps, and goes on as one process does."""

    def step(k: int, model: nn.Module) -> Tensor:
        if k % 2 and (dist.get_rank() == 0 or not isinstance(model, CompiledModule)):
            torch.randn(k)
        return model(torch.ones(8, 6)).square().mean()

    return beside_eager(lambda model: _trained(model, step))


def another_alone() -> dict[str, float]:
    """What another rank draws alone is as if it had not been."""

    def step(_: int, model: nn.Module) -> Tensor:
        if dist.get_rank() == 1 and isinstance(model, CompiledModule):
            torch.randn(7)
        return model(torch.ones(8, 6)).square().mean()

    return beside_eager(lambda model: _trained(model, step))


def seeded_apart_before() -> list[float]:
    """Ranks that are seeded apart, or not at all, before they compile: rank 0's numbers count."""
    torch.manual_seed(10 + RANK)
    model: Any = autopar.compile(Net(), constraints={"strategy": "fsdp"})
    return [float(x) for x in _trained(model, _drawn)]


def _differing(model: nn.Module, kind: str, *, differs: bool) -> Tensor:
    own = np.random.default_rng(RANK if differs else 0)
    made = _output(model, torch.ones(8, 6))
    if kind == "numpy noise":
        return F.mse_loss(made, torch.from_numpy(own.normal(size=(8, 6)).astype(np.float32)))
    if kind == "labels":
        return F.cross_entropy(made, torch.from_numpy(own.integers(0, 6, 8)))
    if kind == "number":
        return made.square().mean() * float(own.random())
    if kind == "tensor of one":
        return (made * torch.tensor(float(own.random()))).square().mean()
    if kind == "whole":
        whole = made.full_tensor() if isinstance(made, ShardedOutput) else made
        return F.mse_loss(whole, torch.from_numpy(own.normal(size=(8, 6)).astype(np.float32)))
    if kind == "parameters":
        (weight,) = [p for n, p in model.named_parameters() if n == "a.weight"]
        return made.square().mean() + float(own.random()) * weight.square().sum()
    if kind == "number within":
        return (made - float(own.random())).square().mean()
    if kind == "mask":
        return made.where(torch.from_numpy(own.random((8, 6)) < 0.5), 0).square().mean()
    assert kind == "seed"
    if differs:
        torch.manual_seed(RANK)
    return made.square().mean()


def _step(k: int, model: Any, kind: str) -> Tensor:
    return _differing(model, kind, differs=k == (0 if model.in_shards else 2))


KINDS = (
    "numpy noise", "labels", "number", "tensor of one", "whole", "parameters", "number within",
    "mask", "seed",
)  # fmt: skip


def differing() -> dict[str, list[str]]:
    """In which step it is told that something differs in the third, or in the first where outputs
    are in shards then, and what is told."""
    found: dict[str, list[str]] = {}
    for in_shards in (False, True):
        for kind in KINDS:
            if in_shards and kind == "number within":
                continue  # One rank cannot go on: `number_within`.
            torch.manual_seed(0)
            model: Any = autopar.compile(Net(in_shards=in_shards), constraints={"strategy": "fsdp"})
            said: list[str] = []
            k = 0
            try:
                for k in range(5):
                    _trained(model, lambda _, m, k=k, kind=kind: _step(k, m, kind), 1)
            except AutoparError as error:
                said = [f"{type(error).__name__}: {error}"]
            found[f"{in_shards} {kind}"] = [str(k), *said]
            torch.manual_seed(0)
    return found


def number_within() -> str:
    """What is told where ranks make other things of shards each, and each is to read its own."""
    model: Any = autopar.compile(Net(in_shards=True), constraints={"strategy": "fsdp"})
    try:
        _trained(model, lambda k, m: _step(k, m, "number within"))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""
