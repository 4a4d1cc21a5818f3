"""Small models that are trained for a report of theirs."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

import autopar

RANK = int(os.environ.get("RANK", "0"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def trained(steps: int, late_s: float = 0.0, strategy: str | None = None) -> nn.Module:
    """After so many steps, before each backward of which rank 1 is late."""
    torch.manual_seed(0)
    model = autopar.compile(Model(), constraints={"strategy": strategy})
    x = torch.randn(32, 64)
    for _ in range(steps):
        loss = model(x)
        if RANK == 1:
            time.sleep(late_s)
        loss.backward()
        model.zero_grad()
    return model


def report() -> str:
    """That of this rank."""
    return autopar.run_report(trained(5, 0.05, "ddp")).record.to_bytes().decode()
