"""A model that is called, and answers, in every way that `autopar.compile` promises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Everything(nn.Module):
    """Positional and keyword inputs, nested ones, options, a frozen parameter, a buffer that
    changes, two losses in a nested output, tensors and other things beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, 16).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(
        self, x: Tensor, more: dict[str, list[Tensor]], *, target: Tensor, scale: float = 1.0
    ) -> dict[str, Any]:
        first, second = more["shifts"]
        hidden = torch.tanh(self.up(x + first)) + self.frozen(second)
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean(0))
        fit = F.mse_loss(self.down(hidden) * scale, target)
        parts = {"size": hidden.pow(2).mean(), "rows": len(x)}
        return {"loss": fit, "more": (parts, [hidden.detach(), self.training, None])}


def everything() -> Everything:
    torch.manual_seed(0)
    return Everything()


def call(rows: int, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call, by position and by name."""
    generator = torch.Generator().manual_seed(seed)
    x, target, first, second = torch.randn(4, rows, WIDTH, generator=generator)
    return (x, {"shifts": [first, second]}), {"target": target, "scale": 0.5}


def losses(result: dict[str, Any]) -> Tensor:
    """Both losses, weighted."""
    return result["loss"] + 0.25 * result["more"][0]["size"]
