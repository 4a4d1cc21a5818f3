"""What the processes of `test_forwards.py` do: models that are given another forward."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.grouped import grouped
from tests.runtime.workers import distance, slow_devices


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """As a language model has it: a body, a head, and a loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.scale = Body(), nn.Linear(8, 4, bias=False), 1.0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.body(x)) * self.scale
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels)
        return found


def with_fused_head(model: Any) -> None:
    """As trl's trainers do it: what has labels goes past the head, and multiplies by its weight."""
    original = model.forward

    def forward(x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if labels is None:
            return original(x)
        hidden = model.body(x)
        loss = F.cross_entropy(
            hidden @ model.head.weight.t() * model.scale, labels, reduction="sum"
        )
        return {"loss": loss / labels.numel()}

    model.forward = forward


def doubled(self: Any, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
    found = Model.forward(self, x, labels)
    return {name: value * 2 * self.scale for name, value in found.items()}


def by_method(model: Any) -> None:
    model.forward = MethodType(doubled, model)


def by_partial(model: Any) -> None:
    model.forward = partial(doubled, model)


def around(model: Any) -> None:
    original = model.forward
    model.forward = lambda *args, **kwargs: {k: v - 1 for k, v in original(*args, **kwargs).items()}


WAYS: dict[str, Callable[[Any], None]] = {
    "fused head": with_fused_head, "method": by_method, "partial": by_partial, "around": around,
}  # fmt: skip


def options() -> dict[str, Any]:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return {"cluster": slow_devices(2), "strategy": "fsdp"} if several else {}


def forwards() -> dict[str, Any]:
    return {name: _compared(change) for name, change in WAYS.items()}


def _compared(change: Callable[[Any], None]) -> dict[str, Any]:
    """How far results are from eager's, and how many programs there are after each."""
    eager = Model()
    model = autopar.compile(copy.deepcopy(eager), **grouped(**options()))
    seen: list[Any] = []
    calls = [[], []]
    for each, called in zip((model, eager), calls, strict=True):
        each.register_forward_hook(lambda *_, called=called: called.append(1))
    first = [each.forward for each in (model, eager)]

    def step(*, by: str = "") -> None:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(len(seen)))
        labels = torch.arange(8) % 4
        found: list[dict[str, Tensor]] = []
        for each, original in zip((model, eager), first, strict=True):
            each.zero_grad()
            found.append((original if by == "first" else each)(x, labels))
            found[-1]["loss"].backward()
        assert found[0].keys() == found[1].keys()
        far = [distance(found[0][name], found[1][name]) for name in found[0]]
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        far += [
            distance(p.grad, q.grad) for p, q in pairs if q.grad is not None and p.grad is not None
        ]
        far.append(distance(model(x)["logits"], eager(x)["logits"]))
        seen.append([max(far), len(model.plans)])

    step()
    for each in (model, eager):
        change(each)
    step()
    model.scale = eager.scale = 0.5
    step()
    model.scale = eager.scale = 1.0
    for each, original in zip((model, eager), first, strict=True):
        each.forward = original
    step()
    for each in (model, eager):
        change(each)
        assert "forward" in vars(each)
        del each.forward
        assert "forward" not in vars(each)
    step()
    return {"seen": seen}


def restored() -> dict[str, Any]:
    """The forward that was there at first, called while there is another one."""
    eager = Model()
    model = autopar.compile(copy.deepcopy(eager), **grouped(**options()))
    first, x = model.forward, torch.randn(8, 8)
    by_method(model)
    with model.unsharded():
        whole = model(x)["logits"]
    return {
        "first": distance(first(x)["logits"], eager(x)["logits"]),
        "other": distance(model(x)["logits"], eager(x)["logits"] * 2),
        "again": distance(first(x)["logits"], eager(x)["logits"]),
        "whole": distance(whole, eager(x)["logits"] * 2),
        "programs": len(model.plans),
    }


def both() -> dict[str, Any]:
    return {"forwards": forwards(), "restored": restored()}
