"""Where the values of a model's tensors come from: a checkpoint, initialisation, or the model.

A `Source` gives rectangles of tensors by name, so that a rank reads or makes no more than it
stores. Everything about a checkpoint is checked before the model is touched.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from autopar.errors import WeightsError, listed
from autopar.runtime.checkpoint.initialise import Initialiser
from autopar.runtime.checkpoint.lazy import Lazy, Region, everything, open_checkpoint
from autopar.runtime.checkpoint.renaming import as_loaded


class Source(Protocol):
    """Values of tensors by their names in the model."""

    def read(self, name: str, place: Region) -> Tensor:
        """The rectangle of tensor `name` at `place`, in its dtype and in memory of its own."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """Tensors that are read shard by shard, and converted to the dtype of the model."""

    tensors: Mapping[str, Lazy]
    dtypes: Mapping[str, torch.dtype]
    digest: str

    def read(self, name: str, place: Region) -> Tensor:
        return self.tensors[name].read(place).to(self.dtypes[name])


@dataclass(frozen=True)
class Sources:
    """The source of each tensor of the model that has no values, or is to get others."""

    by_name: Mapping[str, Source] = field(default_factory=dict[str, Source])
    digest: str = "the model"
    """Ranks compare it."""

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def read(self, name: str, place: Region) -> Tensor:
        return self.by_name[name].read(name, place)

    def whole(self, name: str, like: Tensor) -> Tensor:
        """All of a tensor."""
        return self.read(name, everything(like.shape))


def find_sources(
    model: nn.Module, weights: str | os.PathLike[str] | None, seed: int | None
) -> Sources:
    """Where each tensor of `model` has its values from.

    With `weights`, parameters and persistent buffers are read from there, whatever the model holds.
    With `seed`, tensors on the meta device are initialised. Buffers that no checkpoint has are
    initialised by the model's modules. Nothing is read or changed yet.

    WeightsError if the checkpoint lacks a tensor, has one more, or one of another shape; if a
    parameter on meta has neither.
    """
    if seed is not None and type(seed) is not int:
        raise WeightsError(f"seed={seed!r}: write a whole number, such as seed=0")
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    by_name: dict[str, Source] = {}
    digest = "the model"
    if weights is not None:
        checkpoint = _checkpoint(model, tensors, weights)
        by_name |= dict.fromkeys(checkpoint.tensors, checkpoint)
        digest = f"checkpoint {checkpoint.digest}"
    rest = [name for name, x in tensors.items() if x.is_meta and name not in by_name]
    if rest:
        params = [name for name in rest if isinstance(tensors[name], nn.Parameter)]
        if params and seed is None:
            raise WeightsError(
                f"parameters without values, on the meta device: {listed(params)}. Give "
                "autopar.compile a checkpoint as weights=, or a seed= to initialise them"
            )
        by_name |= dict.fromkeys(rest, Initialiser(model, seed or 0))
    if seed is not None:
        digest += f", seed {seed}"
    return Sources(by_name, digest)


def _checkpoint(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str | os.PathLike[str]
) -> Checkpoint:
    """The checkpoint at `path`, under the first names of the tensors of `model`."""
    stored: Mapping[str, Lazy] = open_checkpoint(path)
    unexpected_is_fine: frozenset[str] = frozenset()
    library = sys.modules.get("transformers.modeling_utils")
    if library is not None and isinstance(model, library.PreTrainedModel):
        from autopar.runtime.checkpoint.renaming import ignorable, renamed_tensors

        stored, unexpected_is_fine = renamed_tensors(model, stored), ignorable(model, stored)
    else:
        stored = as_loaded(model, stored)
    persistent = set(model.state_dict(keep_vars=True))
    first = _first_names(model)
    loaded: dict[str, Lazy] = {}
    unexpected: list[str] = []
    for name, lazy in stored.items():
        if name in first and first[name] in tensors:
            loaded.setdefault(first[name], lazy)
        elif name not in unexpected_is_fine:
            unexpected.append(name)
    required = {first[name] for name in persistent if name in first}
    missing = [name for name in tensors if name in required and name not in loaded]
    problems: list[str] = []
    if missing:
        problems.append(f"it lacks {listed(missing)}")
    if unexpected:
        problems.append(f"only it has {listed(unexpected)}")
    problems += _misfits(tensors, loaded)
    if problems:
        raise WeightsError(
            f"the checkpoint {os.fspath(path)} does not fit {type(model).__name__}: "
            + "; ".join(problems)
        )
    lines = (f"{name} {lazy.dtype} {lazy.shape}" for name, lazy in sorted(loaded.items()))
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    return Checkpoint(loaded, {name: tensors[name].dtype for name in loaded}, digest)


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first name of a tensor for each of its names."""
    params = model.named_parameters(remove_duplicate=False)
    named = [*params, *model.named_buffers(remove_duplicate=False)]
    first = {id(tensor): name for name, tensor in reversed(named)}
    return {name: first[id(tensor)] for name, tensor in named}


_CAST = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point
) - {torch.float4_e2m1fn_x2}
"""Dtypes of files and models that are converted to one another."""


def _misfits(tensors: Mapping[str, Tensor], loaded: Mapping[str, Lazy]) -> Iterator[str]:
    shapes: list[str] = []
    dtypes: list[str] = []
    for name, lazy in loaded.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != lazy.shape:
            shapes.append(f"{name} {list(lazy.shape)} where the model has {list(tensor.shape)}")
        elif tensor.dtype != lazy.dtype and not {tensor.dtype, lazy.dtype} <= _CAST:
            dtypes.append(f"{name} {lazy.dtype} where the model has {tensor.dtype}")
    if shapes:
        yield f"shapes differ: {listed(shapes)}"
    if dtypes:
        yield f"dtypes differ: {listed(dtypes)}"
