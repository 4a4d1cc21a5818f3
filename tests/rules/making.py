"""Tensors written down by shape and kind, and made from a fixed seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Made:
    """A tensor to be made."""

    shape: tuple[int, ...]
    kind: str
    high: int = 0


def F(*shape: int) -> Made:
    return Made(shape, "normal")


def U(*shape: int) -> Made:
    return Made(shape, "unit")


def I(*shape: int, high: int) -> Made:  # noqa: E743 - the letter of the dtype
    return Made(shape, "integer", high)


def B(*shape: int) -> Made:
    return Made(shape, "bool")


def H(*shape: int) -> Made:
    return Made(shape, "float32")


def C(*shape: int) -> Made:
    return Made(shape, "complex")


def S(*shape: int) -> Made:
    """Numbers that do not descend along the last dim."""
    return Made(shape, "sorted")


def make(value: Any, generator: torch.Generator) -> Any:
    """`value` with its tensors made."""
    if isinstance(value, Made):
        return _tensor(value, generator)
    if isinstance(value, list | tuple):
        return type(value)(make(v, generator) for v in value)
    return value


def _tensor(made: Made, generator: torch.Generator) -> Tensor:
    if made.kind == "integer":
        return torch.randint(made.high, made.shape, generator=generator)
    if made.kind == "bool":
        return torch.rand(made.shape, generator=generator) < 0.5
    if made.kind == "complex":
        return torch.randn(made.shape, generator=generator, dtype=torch.complex128)
    if made.kind == "float32":
        return torch.randn(made.shape, generator=generator)
    if made.kind == "sorted":
        return torch.randn(made.shape, generator=generator, dtype=torch.float64).sort().values
    if made.kind == "unit":
        return 0.1 + 0.8 * torch.rand(made.shape, generator=generator, dtype=torch.float64)
    return torch.randn(made.shape, generator=generator, dtype=torch.float64)
