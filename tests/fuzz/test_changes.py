"""Models that are changed between calls, and called with objects, give what eager gives, call by
call: whatever was changed, however often, and back again.

`make fuzz` draws more of them (FUZZ_MODELS, from number FUZZ_FIRST on).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ManyProgramsWarning, UnknownOpWarning
from tests.fuzz.numbers import drawn_numbers

CALLS, WIDTH = 10, 4
FACTORS = (0.5, 1, 1.0, 2.0, True)
GLOBAL = {"factor": 1.0}


@dataclass
class Settings:
    """An object of a model's own."""

    factor: float
    inner: Any = None


def by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


ACTS: tuple[Any, ...] = (torch.relu, torch.tanh, nn.functional.gelu, by(0.5), by(2.0))


class Part(nn.Module):
    """Reads one thing of each kind."""

    shared = 1.0

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)
        self.drop = nn.Dropout(draw.choice((0.0, 0.3)))
        self.norm = draw.choice((nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.Identity()))
        self.factor: Any = draw.choice(FACTORS)
        self.held = {"factors": [draw.choice(FACTORS)]}
        self.settings = Settings(1.0, SimpleNamespace(factor=draw.choice(FACTORS)))
        self.plain = torch.full((WIDTH,), float(draw.choice(FACTORS)))
        self.act = draw.choice(ACTS)

    def forward(self, x: Tensor, how: Any) -> Tensor:
        h = self.norm(self.drop(self.act(self.linear(x)))) * self.plain * self.factor
        h = h * self.held["factors"][0] * self.settings.inner.factor * self.shared
        h = h * GLOBAL["factor"]
        h = how(h) if callable(how) else h * how.factor
        return x + h


class Whole(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(draw) for _ in range(draw.choice((1, 2, 5))))

    def forward(self, x: Tensor, how: Any) -> Tensor:
        for part in self.parts:
            x = part(x, how)
        return x.square().mean()


def change(model: Whole, part: Part, draw: random.Random) -> None:
    """One change of something that forward reads, or of nothing it does."""
    factor = draw.choice(FACTORS)
    hook = draw.choice((lambda _m, _a, out: out * 2, lambda _m, _a, out: None))
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(part, "factor", factor),
        lambda: part.held["factors"].__setitem__(0, factor),
        lambda: setattr(part, "held", {"factors": [factor]}),
        lambda: setattr(part.settings.inner, "factor", factor),
        lambda: setattr(part, "settings", Settings(1.0, SimpleNamespace(factor=factor))),
        lambda: part.plain.fill_(float(factor)),
        lambda: setattr(part, "plain", torch.full((WIDTH,), float(factor))),
        lambda: setattr(part, "shared", factor),
        lambda: setattr(part, "act", draw.choice(ACTS)),
        lambda: setattr(part.drop, "p", draw.choice((0.0, 0.3, 0.6))),
        lambda: part.train(draw.random() < 0.5),
        lambda: model.train(draw.random() < 0.5),
        lambda: part.linear.weight.requires_grad_(draw.random() < 0.5),
        lambda: part.linear.register_forward_hook(hook),
        lambda: part.linear._forward_hooks.clear(),
        lambda: setattr(part, "linear", nn.Linear(WIDTH, WIDTH)),
        lambda: setattr(part.linear, "weight", nn.Parameter(torch.randn(WIDTH, WIDTH))),
        lambda: model.parts.append(Part(draw)) if len(model.parts) < 3 else None,
        lambda: GLOBAL.update(factor=factor),
        lambda: setattr(part, "unread", factor),
    )
    draw.choice(changes)()


def step(call: Callable[..., Tensor], model: nn.Module, x: Tensor, how: Any) -> dict[str, Tensor]:
    """Loss, gradients and new buffers of a call; buffers are then as before."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss = call(x, how)
    if loss.requires_grad:
        loss.backward()
    found = {"loss": loss.detach()}
    found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return found


@pytest.mark.parametrize("number", drawn_numbers(daily=1, nightly=200))
def test_a_changed_model_equals_eager(number: int) -> None:
    draw = random.Random(number)
    torch.manual_seed(number)
    GLOBAL["factor"] = 1.0
    model = Whole(draw).double()
    compiled = autopar.compile(model)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        for kind in (ManyProgramsWarning, UnknownOpWarning):
            warnings.simplefilter("ignore", kind)
        for _ in range(CALLS):
            how = draw.choice(
                (*ACTS, nn.Sigmoid(), Settings(draw.choice(FACTORS)), by(draw.choice(FACTORS)))
            )
            eager = step(lambda *a: nn.Module.__call__(model, *a), model, x, how)
            ours = step(compiled, model, x, how)
            assert ours.keys() == eager.keys()
            for name, tensor in eager.items():
                torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12)
            change(model, draw.choice(list(model.parts)), draw)
            model.double()
            for part in model.parts:
                part.plain = part.plain.double()
