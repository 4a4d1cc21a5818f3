"""Parameters, gradients and states that ranks hold shards of, and what ops find beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.runtime.dtensor_private import cut_piece, dtensor_of
from autopar.runtime.process.beside import rows_differ
from autopar.runtime.process.part_tensors import of_rank_0
from autopar.runtime.program.sharded import whole_of
from autopar.runtime.torch_private import in_backward, map_tensors

_meshes: set[DeviceMesh] = set()


def add_meshes(meshes: Iterable[DeviceMesh]) -> None:
    """DTensors on `meshes` are those meant here."""
    _meshes.update(meshes)


def is_ours(x: Any) -> bool:
    """Whether it is such a DTensor, and has values."""
    return isinstance(x, DTensor) and x.device_mesh in _meshes and not x.is_meta


def is_stored(x: Any) -> bool:
    """Whether it may be a parameter or a gradient, or a part of one: each rank has a rectangle."""
    return is_ours(x) and all(type(p) in (Shard, Replicate) for p in x.placements)


def first_stored(given: Iterable[Any]) -> DTensor | None:
    """The first of those that may be parameters or gradients."""
    return next((x for x in given if is_stored(x)), None)


def is_beside(x: Any, like: DTensor) -> bool:
    """Whether it is a tensor that is not of the mesh of `like`."""
    return isinstance(x, Tensor) and not (
        isinstance(x, DTensor) and x.device_mesh == like.device_mesh
    )


def is_simple(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is given DTensors of one mesh and form, and numbers, alone: it takes no time to
    see."""
    first: DTensor | None = None
    for given in (args, kwargs.values()):
        for x in given:
            if type(x) is DTensor:
                first = x if first is None else first
                # What torch makes may be on a mesh that is only equal, which it has seen before.
                is_one = x.device_mesh is first.device_mesh or x.device_mesh == first.device_mesh
                same = is_one and x.placements == first.placements
                if x is not first and not (same and x.shape == first.shape):
                    return False
            elif x is not None and type(x) not in _NUMBERS:
                return False
    return True


_NUMBERS = frozenset({bool, float, int})


def everywhere(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """A whole tensor as a DTensor that is replicated."""
    if whole.layout != torch.strided:
        return whole  # DTensor has no sparse ones
    whole = whole.resolve_conj().resolve_neg().contiguous()  # as the DTensor says of itself
    placements = [Replicate()] * mesh.ndim
    return dtensor_of(cut_piece(whole, mesh, placements), whole, mesh, placements)


def equal_everywhere(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain tensor, which is the same on all ranks: that of rank 0, but in a loss and its
    backward, where to send it would take too long, and where ranks have rows of their own."""
    if torch.is_grad_enabled() or in_backward() or rows_differ or x.layout != torch.strided:
        return x.to(mesh.device_type).contiguous() if x.layout == torch.strided else x
    return values_of_rank_0(x, mesh)


def values_of_rank_0(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """What rank 0 has in a plain tensor, on the devices of the mesh. A collective call."""
    return of_rank_0(x.to(mesh.device_type))


def replicated_beside(given: Any, like: DTensor) -> Any:
    """Those tensors among the given that are not of the mesh of `like`, replicated there."""
    mesh = like.device_mesh

    def replicated(x: Tensor) -> Tensor:
        if not is_beside(x, like):
            return x
        return everywhere(equal_everywhere(whole_of(x), mesh), mesh)

    return map_tensors(replicated, given)
