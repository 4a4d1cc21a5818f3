"""Tensors of checkpoints, which are not in memory, and of which any rectangle can be read.

A rank reads its shard alone. Checkpoints of `transformers` may store a tensor of the model as
several, such as one per expert, so that tensors can be joined without being read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
        # The result is a view of the file, of which only what is copied is read.
        return self.file.get_slice(self.name)[place].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Packed:
    """One of numbers of 4 bits, two in each byte of a row, in an open safetensors file."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float4_e2m1fn_x2

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
        span, begin = place[self.dim], 0
        parts: list[Tensor] = []
        for part in self.parts:
            length = part.shape[self.dim]
            low, high = max(span.start - begin, 0), min(span.stop - begin, length)
            if low < high:
                inner = (*place[: self.dim], slice(low, high), *place[self.dim + 1 :])
                parts.append(part.read(inner))
            begin += length
        return torch.cat(parts, self.dim) if parts else _empty(place, self.dtype)


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


# The tensors of a checkpoint in safetensors files, none of them read yet.

_INDEX = ".safetensors.index.json"
_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_PACKED = "F4"
"""Files count elements; torch counts bytes of two, along the last dim."""


def open_checkpoint(path: str | os.PathLike[str]) -> dict[str, Lazy]:
    """Every tensor of a safetensors file, or of a directory of them, by its name.

    A directory has an index (`*.safetensors.index.json`), which says which file has which tensor,
    or else all its `*.safetensors` files are taken. WeightsError if there is nothing there, if a
    file is missing or damaged, or if two files have a tensor of one name.
    """
    if not isinstance(path, str | os.PathLike):
        raise WeightsError(
            f"weights is a {type(path).__name__}: give the path of a safetensors file, or of a "
            "directory of them; a state dict goes into the model before autopar.compile"
        )
    root = Path(path)
    if not root.exists():
        raise WeightsError(f"weights: there is no file or directory {root}")
    files, expected = _files(root) if root.is_dir() else ([root], None)
    tensors: dict[str, Lazy] = {}
    for file in files:
        for name, tensor in _open(file).items():
            if expected is not None and expected.get(name) != file.name:
                continue
            if name in tensors:
                raise WeightsError(f"weights: {name} is in two files of {root}")
            tensors[name] = tensor
    missing = sorted(set(expected or ()) - set(tensors))
    if missing:
        raise WeightsError(
            f"weights: the index in {root} speaks of {missing[0]}, which its file does not have"
        )
    return tensors


def _files(root: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files of a directory, and the file of each tensor by its index."""
    indices = sorted(root.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        raise WeightsError(
            f"weights: {root} has several indices ({', '.join(i.name for i in indices)}): keep one "
            "checkpoint per directory"
        )
    if indices:
        try:
            where = dict(json.loads(indices[0].read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"weights: cannot read the index {indices[0]}: {error}") from error
        return [root / name for name in sorted(set(where.values()))], where
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"weights: there is no safetensors file in {root}")
    return files, None


def _open(path: Path) -> dict[str, Lazy]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise WeightsError(
            "weights= needs the package safetensors: pip install 'autopar[hf]'"
        ) from error
    if not path.is_file():
        raise WeightsError(f"weights: {path} is missing, or is no file")
    try:
        file: Any = safe_open(path, "pt")
        return {name: _lazy(file, name, path) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"weights: cannot read {path}: {error}") from error


def _lazy(file: Any, name: str, path: Path) -> Lazy:
    head = file.get_slice(name)
    kind, shape = head.get_dtype(), tuple(head.get_shape())
    if kind in _DTYPES:
        return Stored(file, name, shape, _DTYPES[kind])
    if kind == _PACKED and shape and shape[-1] % 2 == 0:
        return Packed(file, name, (*shape[:-1], shape[-1] // 2))
    return Unreadable(str(path), name, shape, kind)
