"""Ops that change parameters and gradients that ranks hold shards of, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import (
    Handler,
    TorchCall,
    become,
    cut_shard,
    dtensor_of,
    shard_of,
)
from autopar.runtime.op_schemas import (
    as_view,
    done,
    draws_numbers,
    is_distributed_call,
    written_by,
)
from autopar.runtime.process.alone import jointly, whole_alone
from autopar.runtime.process.beside import rows_differ
from autopar.runtime.process.origins import count_changes
from autopar.runtime.process.part_tensors import is_of_some_ranks, of_rank_0
from autopar.runtime.process.proven import is_thin
from autopar.runtime.program.sharded import whole_of
from autopar.runtime.program.sharded_ops import RESIZED, check_distributed_call
from autopar.runtime.torch_private import flatten, in_backward, map_tensors, reshape_wrapper

# Parameters, gradients and states in shards, and plain tensors in the same op.

_meshes: set[DeviceMesh] = set()


def add_meshes(meshes: Iterable[DeviceMesh]) -> None:
    """DTensors on `meshes` are those meant here."""
    _meshes.update(meshes)


def is_ours(x: Any) -> bool:
    """Whether it is a DTensor on one of the meshes, and has values."""
    return isinstance(x, DTensor) and x.device_mesh in _meshes and not x.is_meta


def is_stored(x: Any) -> bool:
    """Whether it may be a parameter or a gradient, or a part of one: each rank's shard is a
    rectangle."""
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
    """Whether all arguments are DTensors of one mesh, placement and shape, or numbers. A fast
    check."""
    first: DTensor | None = None
    for given in (args, kwargs.values()):
        for x in given:
            if type(x) is DTensor:
                first = x if first is None else first
                # Torch's results may be on an equal mesh that is another object.
                is_one = x.device_mesh is first.device_mesh or x.device_mesh == first.device_mesh
                same = is_one and x.placements == first.placements
                if x is not first and not (same and x.shape == first.shape):
                    return False
            elif x is not None and type(x) not in _NUMBERS:
                return False
    return True


_NUMBERS = frozenset({bool, float, int})


def everywhere(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """A whole tensor as a replicated DTensor."""
    if whole.layout != torch.strided:
        return whole  # DTensor has no sparse ones
    whole = whole.resolve_conj().resolve_neg().contiguous()  # as the DTensor says of itself
    placements = [Replicate()] * mesh.ndim
    return dtensor_of(cut_shard(whole, mesh, placements), whole, mesh, placements)


def equal_everywhere(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain tensor, with the values of rank 0 on all ranks. In a loss and its backward sending
    takes too long, and ranks with rows of their own have other values: there it is this rank's."""
    if torch.is_grad_enabled() or in_backward() or rows_differ or x.layout != torch.strided:
        return x.to(mesh.device_type).contiguous() if x.layout == torch.strided else x
    return values_of_rank_0(x, mesh)


def values_of_rank_0(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Rank 0's values of a plain tensor, on the devices of the mesh. A collective call."""
    return of_rank_0(x.to(mesh.device_type))


def replicated_beside(given: Any, like: DTensor) -> Any:
    """`given`, with tensors that are not on the mesh of `like` replicated there."""
    mesh = like.device_mesh

    def replicated(x: Tensor) -> Tensor:
        if not is_beside(x, like):
            return x
        return everywhere(equal_everywhere(whole_of(x), mesh), mesh)

    return map_tensors(replicated, given)


aten = torch.ops.aten

_GIVEN_A_SHAPE = (
    "{op} would change the shape of a tensor that ranks hold shards of: write "
    "w = {view}(w, ...), which leaves that as it is"
)


def on_all_ranks(handler: Handler) -> Handler:
    """`handler` of an op that may change tensors in shards. All ranks must make the call, unless a
    rank alone writes to a tensor of its own."""

    def handle(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = flatten((args, kwargs))[0]
        if not any(map(is_ours, given)):
            return handler(plain, op, args, kwargs)
        if is_distributed_call(op):
            check_distributed_call(op, args)
        written = [x for x in written_by(op, args, kwargs) if is_ours(x)]
        reads = not written and not draws_numbers(op)
        with jointly(op, given, reads=reads) as joint:
            if not joint:
                args, kwargs = map_tensors(whole_alone, (args, kwargs))
                return done(op(*args, **kwargs))
            result = handler(plain, op, args, kwargs)
        count_changes(written)
        return result

    return handle


def written_by_element(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An op that changes a tensor in place, element by element."""
    if is_simple(args, kwargs) and not is_thin(args[0]):
        result = plain(*args, **kwargs)
        count_changes(args[:1])
        return result
    return on_all_ranks(_written_by_element)(plain, op, args, kwargs)


def _written_by_element(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    like = first_stored(written_by(op, args, kwargs))
    given = flatten((args, kwargs))[0]
    is_spread = op is aten.copy_.default and args[1].shape != args[0].shape
    if like is None or is_spread or is_thin(like) or not all(_goes_into(x, like) for x in given):
        return computed_into(plain, op, args, kwargs)
    return plain(*replicated_beside(args, like), **replicated_beside(kwargs, like))


def _goes_into(x: Any, like: DTensor) -> bool:
    """Whether those shards of `like` can be computed from the shards of `x`, if it has any."""
    if not isinstance(x, DTensor) or x.device_mesh != like.device_mesh:
        return True
    is_alike = (x.shape, x.placements) == (like.shape, like.placements)
    return is_alike or all(type(p) is Replicate for p in x.placements)


def _written_elsewhere(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An op that reads such DTensors, and writes to something else."""
    if any(isinstance(x, DTensor) for x in written_by(op, args, kwargs)):
        return plain(*args, **kwargs)
    args, kwargs = map_tensors(lambda x: whole_of(x) if is_ours(x) else x, (args, kwargs))
    return done(op(*args, **kwargs))


def changed_shape(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that makes its argument a view of itself in place, such as `squeeze_`."""
    x, view = args[0], as_view(op)
    if not is_ours(x):
        return plain(*args, **kwargs)
    viewed = view(x, *args[1:], **kwargs)
    if not isinstance(viewed, DTensor) and is_thin(x) and not is_of_some_ranks(x.device_mesh):
        # The op drops a sharded dim, all of which is on one rank.
        viewed = everywhere(view(whole_of(x), *args[1:], **kwargs), x.device_mesh)
    if isinstance(x, nn.Parameter) or not isinstance(viewed, DTensor):
        raise AutoparError(_GIVEN_A_SHAPE.format(op=op, view=view))
    become(x, viewed)
    reshape_wrapper(op, args, kwargs)
    return x


_FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random",
        "uniform",
    )
)  # fmt: skip
"""Ops that overwrite their argument with random numbers, and do not read it."""


def drawn_whole(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Random numbers: every rank draws them for whole tensors, and takes its shard of rank 0's."""
    like = first_stored(flatten((args, kwargs))[0])
    if like is None:
        return plain(*args, **kwargs)
    mesh = like.device_mesh

    def blank(x: DTensor) -> Tensor:
        if op.name().partition(".")[0] not in _FILLS:
            return whole_of(x).clone()
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=shard_of(x).device)

    def sharded(whole: Tensor) -> Tensor:
        same = whole.shape == like.shape
        placements = like.placements if same else [Replicate()] * mesh.ndim
        shard = cut_shard(values_of_rank_0(whole, mesh), mesh, placements).clone()
        return dtensor_of(shard, whole, mesh, placements)

    wholes, outputs = _on_wholes(op, args, kwargs, blank, mesh)
    for x, whole in wholes:
        shard_of(x).copy_(
            cut_shard(values_of_rank_0(whole, x.device_mesh), x.device_mesh, x.placements)
        )
    back = {id(whole): x for x, whole in wholes}
    return map_tensors(lambda x: back[id(x)] if id(x) in back else sharded(x), outputs)


def computed_into(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that writes into arguments, computed with whole tensors."""
    like = first_stored(written_by(op, args, kwargs))
    if like is None:
        return _written_elsewhere(plain, op, args, kwargs)
    wholes, outputs = _on_wholes(op, args, kwargs, lambda x: whole_of(x).clone(), like.device_mesh)
    for x, whole in wholes:
        if whole.shape != x.shape:
            raise AutoparError(RESIZED.format(now=tuple(whole.shape), was=tuple(x.shape)))
        shard_of(x).copy_(cut_shard(whole, x.device_mesh, x.placements))
    back = {id(whole): x for x, whole in wholes}
    return map_tensors(lambda x: back.get(id(x), x), outputs)


def _on_wholes(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    copied: Callable[[DTensor], Tensor],
    mesh: DeviceMesh,
) -> tuple[list[tuple[DTensor, Tensor]], Any]:
    """(pairs of a written DTensor and its whole copy, result) of an op on whole tensors."""
    written = list(written_by(op, args, kwargs))
    wholes = {id(x): (x, copied(x)) for x in written if isinstance(x, DTensor)}
    beside = {id(x) for x in written} - wholes.keys()

    def entire(x: Tensor) -> Tensor:
        if id(x) in wholes:
            return wholes[id(x)][1]
        if id(x) in beside:
            return x
        return whole_of(x) if isinstance(x, DTensor) else equal_everywhere(whole_of(x), mesh)

    outputs = done(op(*map_tensors(entire, args), **map_tensors(entire, kwargs)))
    return list(wholes.values()), outputs
