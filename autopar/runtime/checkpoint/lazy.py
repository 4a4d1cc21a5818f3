"""Tensors that are not in memory, of which any rectangle can be had: what checkpoints consist of.

A rank asks for its shard alone. Checkpoints of `transformers` may store a tensor of the model as
several (one per expert, say), so that tensors can be put together without being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.errors import WeightsError

Region = tuple[slice, ...]
"""One slice per dim, with a start and a stop, and no step."""


class Lazy(Protocol):
    """A tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, place: Region) -> Tensor:
        """The rectangle at `place`, in memory of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor called `name` in an open safetensors file."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, place: Region) -> Tensor:
        if not place:
            return self.file.get_tensor(self.name).clone()
        # What comes back is a view of the file, of which only what is copied is read.
        return self.file.get_slice(self.name)[place].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Packed:
    """One of numbers of 4 bits, two in each byte of a row, in an open safetensors file."""

    file: Any
    name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float4_e2m1fn_x2

    def read(self, place: Region) -> Tensor:
        # Of the view of the file, too, only what is copied is read; torch copies bytes alone.
        rows = self.file.get_tensor(self.name).view(torch.uint8)[place]
        return rows.clone(memory_format=torch.contiguous_format).view(self.dtype)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """One of a `kind` that torch has no dtype for: WeightsError as soon as a model needs it."""

    path: str
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        raise WeightsError(
            f"weights: {self.name} in {self.path} is {self.kind}{list(self.shape)}, for which "
            "torch has no dtype: read it with the library that wrote it, and save what the model "
            "holds of it"
        )

    def read(self, place: Region) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)[place]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Tensors of one shape, along a new dim `dim`."""

    parts: Sequence[Lazy]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, place: Region) -> Tensor:
        inner = (*place[: self.dim], *place[self.dim + 1 :])
        parts = self.parts[place[self.dim]]
        if not parts:
            return _empty(place, self.dtype)
        return torch.stack([part.read(inner) for part in parts], self.dim)


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors one after the other along dim `dim`."""

    parts: Sequence[Lazy]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, place: Region) -> Tensor:
        wanted, begin = place[self.dim], 0
        found: list[Tensor] = []
        for part in self.parts:
            length = part.shape[self.dim]
            low, high = max(wanted.start - begin, 0), min(wanted.stop - begin, length)
            if low < high:
                inner = (*place[: self.dim], slice(low, high), *place[self.dim + 1 :])
                found.append(part.read(inner))
            begin += length
        return torch.cat(found, self.dim) if found else _empty(place, self.dtype)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A tensor with dims `a` and `b` exchanged."""

    part: Lazy
    a: int
    b: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self._swapped(self.part.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    def read(self, place: Region) -> Tensor:
        return self.part.read(self._swapped(place)).transpose(self.a, self.b).contiguous()

    def _swapped(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = list(items)
        changed[self.a], changed[self.b] = items[self.b], items[self.a]
        return tuple(changed)


def everything(shape: Sequence[int]) -> Region:
    """The place that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def _empty(place: Region, dtype: torch.dtype) -> Tensor:
    return torch.empty([s.stop - s.start for s in place], dtype=dtype)
