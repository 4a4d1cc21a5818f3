"""Whole tensors to the shards of ranks, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from autopar.errors import VerificationError
from autopar.ir import uneven
from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import chunk_index, local_part_sizes, local_shape
from autopar.ir.sharding import R, Sharding
from autopar.ir.uneven import chunked_axes, chunked_dim, without_chunks


def shard(
    tensor: Tensor,
    kind: TensorType,
    atoms: Sequence[Atom],
    sharding: Sharding,
    mesh: Mesh,
    coordinate: Sequence[int],
) -> Tensor:
    """The shard of `tensor`, whole and of type `kind`, on the rank at `coordinate`.

    Contiguous, with a storage of its own; `tensor` itself if it is replicated. ValueError if the
    sharding is partial: a whole tensor has no partial shards.
    """
    if sharding.has_partial:
        raise ValueError(f"{sharding}: a whole tensor has no partial pieces")
    if sharding.is_replicated:
        return tensor
    split, place = _place(kind, atoms, sharding, mesh, coordinate)
    shape = tuple(map(prod, local_part_sizes(kind, atoms, sharding, mesh.sizes)))
    local = tensor.reshape(split)[_slices(place)].reshape(shape)
    dim = chunked_dim(sharding)
    if dim is not None:
        local = local.narrow(dim, *_rows(shape[dim], sharding, mesh, coordinate))
    return local.clone(memory_format=torch.contiguous_format)


def unshard(
    shards: Sequence[Tensor],
    kind: TensorType,
    atoms: Sequence[Atom],
    sharding: Sharding,
    mesh: Mesh,
    *,
    tolerance: float = 0.0,
    name: str = "a tensor",
) -> Tensor:
    """The whole tensor from the shard of every rank, in order of rank; partial ones are added up.

    VerificationError, with `name`, if ranks that hold the same shard differ by more than
    `tolerance`, relative to the largest magnitude in it.
    """
    held = {mesh.coordinate(rank): local for rank, local in enumerate(shards)}
    for axis, placement in enumerate(sharding):
        if placement.kind == "P":
            size = mesh.sizes[axis]
            held = {
                at: torch.stack([held[peer] for peer in _peers(at, axis, size)]).sum(0)
                for at in held
            }
    summed = Sharding(tuple(R if p.kind == "P" else p for p in sharding))
    held, summed = _join(held, kind, atoms, summed, mesh, name), without_chunks(summed)
    sizes = local_part_sizes(kind, atoms, summed, mesh.sizes)
    expected = tuple(map(prod, sizes))
    split: tuple[int, ...] = ()
    first: dict[_Place, Tensor] = {}
    for coordinate, local in held.items():
        split, place = _place(kind, atoms, summed, mesh, coordinate)
        if tuple(local.shape) != expected:
            raise VerificationError(
                f"{name} has shape {tuple(local.shape)} at {coordinate}, not {expected}"
            )
        seen = first.setdefault(place, local)
        if seen is not local and not _equal(seen, local, tolerance):
            raise VerificationError(f"{name}, in {sharding}, differs between ranks: {coordinate}")
    result = shards[0].new_empty(split)
    for place, local in first.items():
        result[_slices(place)] = local.reshape([size for parts in sizes for size in parts])
    return result.reshape(kind.shape)


def _rows(size: int, sharding: Sharding, mesh: Mesh, coordinate: Sequence[int]) -> tuple[int, int]:
    """(start, length) of the rows that a rank has of `size` cut into chunks."""
    return uneven.held(size, [(mesh.sizes[k], coordinate[k]) for k in chunked_axes(sharding)])


def _join(
    shards: Mapping[tuple[int, ...], Tensor],
    kind: TensorType,
    atoms: Sequence[Atom],
    sharding: Sharding,
    mesh: Mesh,
    name: str,
) -> dict[tuple[int, ...], Tensor]:
    """The tensors of every rank, with the chunks of all ranks joined."""
    joined, dim = dict(shards), chunked_dim(sharding)
    if dim is None:
        return joined
    shape = list(local_shape(kind, atoms, without_chunks(sharding), mesh.sizes))
    size = shape[dim]
    for coordinate, local in joined.items():
        shape[dim] = _rows(size, sharding, mesh, coordinate)[1]
        if list(local.shape) != shape:
            raise VerificationError(
                f"{name} has shape {tuple(local.shape)} at {coordinate}, not {tuple(shape)}"
            )
    for axis in reversed(chunked_axes(sharding)):
        joined = {
            at: torch.cat([joined[peer] for peer in _peers(at, axis, mesh.sizes[axis])], dim)
            for at in joined
        }
    return joined


_Place = tuple[tuple[int, int], ...]
"""Per part of a tensor, where a shard begins and ends in it."""


def _place(
    kind: TensorType,
    atoms: Sequence[Atom],
    sharding: Sharding,
    mesh: Mesh,
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], _Place]:
    """The shape with one dim per part, and the place of the shard in it."""
    split = tuple(atoms[atom].size for _, atom in kind.slots())
    place: list[tuple[int, int]] = []
    for (slot, _), size in zip(kind.slots(), split, strict=True):
        at, count = chunk_index(kind, atoms, sharding, mesh.sizes, coordinate, slot)
        length = size // count
        place.append((at * length, (at + 1) * length))
    return split, tuple(place)


def _slices(place: _Place) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in place)


def _peers(coordinate: tuple[int, ...], axis: int, size: int) -> list[tuple[int, ...]]:
    """The coordinates that differ on `axis` alone, in order."""
    return [(*coordinate[:axis], i, *coordinate[axis + 1 :]) for i in range(size)]


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if tolerance == 0 or not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(a.abs().max().item(), 1e-30) if a.numel() else 1.0
    return bool(((a - b).abs() <= tolerance * scale).all())
