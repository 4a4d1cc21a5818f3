"""DTensors of some ranks, in a script that all ranks run: the parameters of a pipeline's stages.

In torch, a rank outside of a DTensor's mesh has nothing of it, and `full_tensor()` returns an empty
tensor there. A script would go on with a norm of zero, or save an empty tensor. So a tensor on the
mesh of a stage becomes replicated on all ranks, where a script or torch replicates it. The norm of
gradients on several meshes is that of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from autopar.ir.grouping import grouped
from autopar.runtime.dtensor_private import (
    Handler,
    TorchCall,
    cut_shard,
    dtensor_of,
    is_of,
    shard_of,
    take_over_ops,
    take_over_whole_tensors,
)
from autopar.runtime.op_schemas import written_by
from autopar.runtime.process.origins import count_changes
from autopar.runtime.process.own_group import broadcast, bytes_behind, own_group, unpacked
from autopar.runtime.process.proven import adds_up, is_any_uneven
from autopar.runtime.replacing import once
from autopar.runtime.torch_private import map_tensors

_known: dict[DeviceMesh, DeviceMesh] = {}
"""The mesh of all ranks, by meshes of some ranks."""


def know(meshes: Iterable[DeviceMesh], world: DeviceMesh) -> None:
    """From now on DTensors on those of `meshes` that have fewer ranks than `world` behave as said
    above."""
    if not _known:
        take_over_whole_tensors(_replicated, _total_norm, _is_known)
    _known.update((mesh, world) for mesh in meshes if mesh.size() < world.size())


def is_of_some_ranks(mesh: DeviceMesh) -> bool:
    """Whether it is a known mesh of some ranks."""
    return mesh in _known


def mesh_of_all(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of all ranks, for a known mesh of some ranks; `mesh` itself otherwise."""
    return _known.get(mesh, mesh)


def _is_known(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and is_of_some_ranks(tensor.device_mesh)


_ON_LISTS = ("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")
_NORMS = torch.ops.aten._foreach_norm.Scalar
_NUMBER = "aten::_local_scalar_dense"
_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"


@once
def know_numbers() -> None:
    """From now on `item()` of a DTensor is the whole value, not a rank's partial term. Ops on lists
    take tensors on several meshes, and plain ones."""
    take_over_ops(_handler_of, set())


def _handler_of(op: Any) -> Handler | None:
    name: str = op.name()
    if name.startswith(_ON_LISTS):
        return _by_mesh
    return {_UNSCALE: _unscale, _NUMBER: _number}.get(name)


def _number(plain: TorchCall, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (tensor,) = args
    is_here = all(p.is_replicate() for p in tensor.placements) and not _is_known(tensor)
    return plain(tensor) if is_here else tensor.full_tensor().item()


def _places_by_mesh(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Where in a list the tensors of each mesh are."""
    meshes = (x.device_mesh if isinstance(x, DTensor) else None for x in tensors)
    return list(grouped((mesh, place) for place, mesh in enumerate(meshes)).values())


def _by_mesh(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op on lists of tensors, run for each mesh: torch would use the first tensor's. The
    versions of DTensors that it changes are incremented, as autograd does for other tensors."""
    tensors: Sequence[Tensor] = args[0]
    if op is _NORMS and not adds_up(op, args) and is_any_uneven(tensors):
        return [torch.linalg.vector_norm(x, *args[1:], **kwargs) for x in tensors]
    results: list[Any] = [None] * len(tensors)
    for places in _places_by_mesh(tensors):
        given: Sequence[Any] = [
            [each[k] for k in places]
            if isinstance(each, (list, tuple)) and len(each) == len(tensors)
            else each
            for each in args
        ]
        if not isinstance(tensors[places[0]], DTensor):
            given = map_tensors(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, given)
        for place, result in zip(places, plain(*given, **kwargs) or (), strict=False):
            results[place] = result
    changed = {id(x): x for x in written_by(op, args, kwargs) if isinstance(x, DTensor)}
    if changed:
        count_changes(changed.values())
        torch.autograd.graph.increment_version(list(changed.values()))
    return None if all(each is None for each in results) else results


def _unscale(plain: TorchCall, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """An infinity or NaN in any rank's scaled gradients counts on all ranks."""
    tensors, has_inf, scale = args
    for places in _places_by_mesh(tensors):
        own = torch.zeros_like(has_inf)
        plain([tensors[k] for k in places], own, scale, **kwargs)
        has_inf.copy_(torch.maximum(has_inf, own))
    if any(isinstance(x, DTensor) for x in tensors):
        # torch goes by the placements of the first gradient: if that is replicated, each rank has
        # only checked its own shards of the others.
        everywhere = has_inf.full_tensor() if isinstance(has_inf, DTensor) else has_inf.clone()
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=own_group())
        has_inf.copy_(everywhere)


def of_rank_0(x: Tensor) -> Tensor:
    """Rank 0's values of a plain tensor, which has the same shape on all ranks. A collective call
    of all."""
    x = x.clone(memory_format=torch.contiguous_format)
    broadcast(x)
    return x


def shard_of_rank_0(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's shard of rank 0's `whole`. A collective call of all."""
    if not is_of_some_ranks(mesh):
        cut = distribute_tensor(bytes_behind(whole.contiguous()), mesh, placements)
        return unpacked(cut.to_local(), whole.dtype)
    return cut_shard(of_rank_0(whole), mesh, placements).clone()


def _replicated(gather: Callable[[], Tensor], tensor: DTensor) -> DTensor:
    """All of a tensor on all ranks."""
    mesh = _known[tensor.device_mesh]
    whole = _Everywhere.apply(tensor, gather)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


class _Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gather: Callable[[], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.like = tensor
        mesh, local = tensor.device_mesh, shard_of(tensor)
        device = torch.device(mesh.device_type)
        if is_of(mesh):
            whole = gather().to(device).contiguous()
            if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
                whole = whole.clone()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        broadcast(whole, int(mesh.mesh.flatten()[0]))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mesh, placements = ctx.like.device_mesh, ctx.like.placements
        return dtensor_of(cut_shard(grad, mesh, placements), ctx.like, mesh, placements), None


def _total_norm(norm: Callable[..., Tensor], tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm over the tensors of all meshes; a plain tensor, equal on all ranks."""
    by_mesh = (norm([tensors[k] for k in places], norm_type) for places in _places_by_mesh(tensors))
    mesh_norms = [each.full_tensor() if isinstance(each, DTensor) else each for each in by_mesh]
    norms = torch.stack([each.to(mesh_norms[0].device) for each in mesh_norms])
    # The "norm" of order 0 is a count, and the counts of meshes add up.
    return torch.linalg.vector_norm(norms, norm_type) if norm_type else norms.sum()
