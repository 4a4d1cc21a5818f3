"""What autopar says to write instead of some of the forwards that depend on data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def halve_where(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    return torch.where(y.mean() > 0, y / 2, y).mean()


def choose_layer(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    for _ in range(3):
        y = torch.where(torch.rand([]) < 0.5, y, m.line(y))
    return y.mean()


def loop_on_tensors(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    high = x.norm()
    for _ in range(2):
        low = high / 2
        high = low + 1
    return (m.line(x) * high).mean()


def repeat_so_often(m: Any, x: Tensor, ids: Tensor, times: int) -> Tensor:
    y = m.line(x)
    for _ in range(times):
        y = m.line(y)
    return y.mean()
