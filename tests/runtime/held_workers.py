"""A model that finds tensors in lists, dicts, closures and globals: processes of `test_held.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.grouped import grouped

OF_MODULE = [torch.zeros(4)]


class Holds(nn.Module):
    """Draws what it finds around it from `seed`, and its parameters from another one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(4, 4)
        torch.manual_seed(seed)
        self.listed, self.named = [torch.randn(4)], {"a": torch.randn(4)}
        self.modules_of_no_list = [nn.Linear(4, 4)]
        OF_MODULE[0] = torch.randn(4)
        enclosed = torch.randn(4)
        self.scale = lambda: enclosed

    def forward(self, x: Tensor) -> Tensor:
        found = self.modules_of_no_list[0](self.line(x)) * self.listed[0] * self.named["a"]
        return (found * OF_MODULE[0] + self.scale()).square().mean()


def held() -> dict[str, Any]:
    rank, seen = int(os.environ["RANK"]), dict[str, Any]()
    torch.manual_seed(7)
    x = torch.randn(8, 4)
    for name, options in {"free": {}, "ddp": {"strategy": "ddp"}}.items():
        eager = Holds(1)
        expected = float(eager(x))
        eager.listed[0].mul_(2)
        doubled = float(eager(x))
        model = Holds(1 + rank)
        compiled: Any = autopar.compile(model, **grouped(**options))
        losses = [float(compiled(x)) for _ in range(2)]
        model.listed[0].mul_(2)
        losses.append(float(compiled(x)))
        wanted = (expected, expected, doubled)
        seen[name] = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    return seen
