"""What a script computes from parameters and gradients that ranks hold pieces of, and what it does
to them, as on one device.

DTensor has the arithmetic. Here is what it refuses, or does otherwise than a script of one device
means it:

- Plain tensors beside (`loss + weight.square().sum()`, `grad.mul_(mask)`) are taken to be the same
  on every rank in a loss and its backward; elsewhere the values are those of rank 0.
- Random numbers (`nn.init.normal_`, `torch.randn_like`) are drawn for the whole tensor, and are
  those of rank 0: shards would draw the same numbers each, and copies of a shard other ones.
- A part of a tensor (`weight[3]`, `bias.chunk(4)`) that ranks have no view of, but a copy, is
  written to in the tensor as well.
- What changes a tensor in place other than element by element (`weight[mask] = 0`, `tril_`), or is
  computed into it (`torch.eye(..., out=weight)`), is computed as a whole.
- `weight.data = values`, `weight.grad = values` and `weight.grad.data = values` are what ops read
  from then on.

All are collective calls, which every rank makes, as every rank runs the same script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import (
    Handler,
    TorchCall,
    cut_piece,
    dtensor_of,
    piece_of,
    take_over_assignments,
    take_over_copies,
    take_over_ops,
)
from autopar.runtime.module.readings import know_readings
from autopar.runtime.process.part_tensors import is_of_some_ranks, mesh_of_all, of_rank_0
from autopar.runtime.process.uneven import added_up, adds_up, is_any_uneven
from autopar.runtime.program.sharded import reduces_all, shares_memory, view_of_whole, whole_of
from autopar.runtime.torch_private import (
    draws_numbers,
    flatten,
    has_out,
    has_shape_of_data,
    in_backward,
    is_function,
    is_in_place,
    is_pointwise,
    is_view,
    map_tensors,
    written_by,
)

aten = torch.ops.aten

_ROWS = (
    "{op} would compute a loss from parameters and a plain tensor outside of a compiled model "
    "whose ranks are handed rows of their own, and each would have a gradient of its rows: compute "
    'it in the forward of the model, or hand every rank the whole batch (inputs="global")'
)

_meshes: set[DeviceMesh] = set()
_rows_differ: list[bool] = []


def know_changes(meshes: Iterable[DeviceMesh]) -> None:
    """From now on DTensors on `meshes` behave as said above."""
    if not _meshes:
        take_over_ops(_handler_of)
        take_over_assignments(_assigned)
        take_over_copies(_is_ours)
        know_readings(_is_ours)
    _meshes.update(meshes)


def know_rows_differ() -> None:
    """From now on plain tensors are not the same on every rank."""
    _rows_differ[:] = [True]


def _handler_of(op: Any) -> Handler | None:
    if draws_numbers(op):
        return _drawn
    if op is aten.detach_.default:
        return _detached
    if has_out(op) or (is_in_place(op) and not _is_by_element(op)):
        return _computed_into
    if is_in_place(op):
        return _written
    if op in _MADE_ANEW:
        return _made_anew
    if not is_function(op):
        return None
    return _viewed if is_view(op) else _computed


@cache
def _is_by_element(op: Any) -> bool:
    return (is_pointwise(op) and "loss" not in op.name()) or op in _BY_ELEMENT


_BY_ELEMENT = frozenset(
    {
        aten.clone.default, aten.copy_.default, aten.fill_.Scalar, aten.full_like.default,
        aten.masked_fill_.Scalar, aten.ones_like.default, aten.zero_.default,
        aten.zeros_like.default,
    }
)  # fmt: skip
"""Ops beside those that torch calls pointwise. It does so of losses, which are means as well."""

_PRODUCTS = frozenset(
    {
        aten.addmm.default, aten.bmm.default, aten.cat.default, aten.dot.default, aten.mm.default,
        aten.mv.default, aten.stack.default,
    }
)  # fmt: skip
"""Other ops that DTensor does right with replicated tensors beside."""


_MADE_ANEW = frozenset(
    {
        aten.new_empty.default, aten.new_full.default, aten.new_ones.default,
        aten.new_zeros.default,
    }
)  # fmt: skip
"""Ops that make a tensor of any shape where another one is."""


def _detached(_: TorchCall, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Autograd has done it. To DTensor the op is unknown in torch 2.11, where autograd calls it for
    what a function of its own hands on."""
    return args[0]


def _made_anew(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A tensor made like another one is plain if it has a shape of its own or no values yet:
    DTensor has no views in place, such as `nn.init.orthogonal_` takes."""
    like, shape, *rest = args
    is_alike = tuple(shape) == tuple(like.shape) and op is not aten.new_empty.default
    if not _is_ours(like) or is_alike:
        return plain(*args, **kwargs)
    return op(piece_of(like), shape, *rest, **kwargs)


def _is_ours(x: Any) -> bool:
    """Whether it is such a DTensor, and has values."""
    return isinstance(x, DTensor) and x.device_mesh in _meshes and not x.is_meta


def _is_stored(x: Any) -> bool:
    """Whether it may be a parameter or a gradient, or a part of one: each rank has a rectangle."""
    return _is_ours(x) and all(type(p) in (Shard, Replicate) for p in x.placements)


def _first_stored(given: Iterable[Any]) -> DTensor | None:
    return next((x for x in given if _is_stored(x)), None)


def _is_beside(x: Any, like: DTensor) -> bool:
    """Whether it is a tensor that is not of the mesh of `like`."""
    return isinstance(x, Tensor) and not (
        isinstance(x, DTensor) and x.device_mesh == like.device_mesh
    )


def _is_simple(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is given DTensors of one mesh, and numbers, alone: it takes no time to see."""
    mesh: DeviceMesh | None = None
    for given in (args, kwargs.values()):
        for x in given:
            if type(x) is DTensor:
                if mesh is not None and x.device_mesh is not mesh:
                    return False
                mesh = x.device_mesh
            elif x is not None and type(x) not in _NUMBERS:
                return False
    return True


_NUMBERS = frozenset({bool, float, int})


def _computed(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an op makes that changes nothing. What torch makes of DTensors of which this rank has
    nothing is not to be relied on but where each element is by itself."""
    if _is_by_element(op) and _is_simple(args, kwargs):
        return added_up(plain(*args, **kwargs))
    given = flatten((args, kwargs))[0]
    like = next((x for x in given if _is_ours(x)), None)
    if like is None:
        return plain(*args, **kwargs)
    mesh = like.device_mesh
    is_mixed = any(_is_beside(x, like) for x in given)
    differentiated = torch.is_grad_enabled() and any(map(_needs_gradient, given))
    # A number, such as the loss, is that of all rows.
    if differentiated and _rows_differ and any(_is_beside(x, like) and x.dim() for x in given):
        raise AutoparError(_ROWS.format(op=op))
    is_whole = is_mixed or "loss" in op.name() or has_shape_of_data(op) or reduces_all(args)
    if not (_is_by_element(op) or op in _PRODUCTS or adds_up(op, args)):
        is_whole |= is_any_uneven(given)
    if is_of_some_ranks(mesh):
        is_whole |= not _is_by_element(op)
    elif _is_by_element(op) or op in _PRODUCTS:
        is_whole = False
        args, kwargs = _replicated((args, kwargs), like)
    if not is_whole:
        return map_tensors(added_up, plain(*args, **kwargs))

    def entire(x: Tensor) -> Tensor:
        return whole_of(x) if isinstance(x, DTensor) else _equal(whole_of(x), mesh)

    made = op(*map_tensors(entire, args), **map_tensors(entire, kwargs))
    return map_tensors(lambda x: _everywhere(x, mesh_of_all(mesh)), made)


def _needs_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _written(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that changes a tensor in place, element by element."""
    if _is_simple(args, kwargs):
        return plain(*args, **kwargs)
    like = _first_stored(written_by(op, args, kwargs))
    if like is None:
        return _written_elsewhere(plain, op, args, kwargs)
    return plain(*_replicated(args, like), **_replicated(kwargs, like))


def _written_elsewhere(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An op that is given such DTensors, and writes to something else."""
    if any(isinstance(x, DTensor) for x in written_by(op, args, kwargs)):
        return plain(*args, **kwargs)
    args, kwargs = map_tensors(lambda x: whole_of(x) if _is_ours(x) else x, (args, kwargs))
    return op(*args, **kwargs)


def _replicated(given: Any, like: DTensor) -> Any:
    """Those tensors among the given that are not of the mesh of `like`, replicated there."""
    mesh = like.device_mesh

    def replicated(x: Tensor) -> Tensor:
        if not _is_beside(x, like):
            return x
        return _everywhere(_equal(whole_of(x), mesh), mesh)

    return map_tensors(replicated, given)


def _everywhere(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    placements = [Replicate()] * mesh.ndim
    return dtensor_of(cut_piece(whole, mesh, placements), whole, mesh, placements)


def _equal(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain tensor, which is the same on all ranks: that of rank 0, but in a loss and its
    backward, where to send it would take too long, and where ranks have rows of their own."""
    if torch.is_grad_enabled() or in_backward() or _rows_differ:
        return x.to(mesh.device_type).contiguous()
    return _of_rank_0(x, mesh)


def _of_rank_0(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return of_rank_0(x.to(mesh.device_type))


def _viewed(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view, through which one may write where autograd has nothing against it."""
    source = args[0]
    if not _is_stored(source) or op in _VIEWS_OF_SHARDS:
        return plain(*args, **kwargs)
    if torch.is_grad_enabled() and source.requires_grad:
        try:
            return plain(*args, **kwargs)
        except RuntimeError:  # DTensor has no such view of shards
            mesh = mesh_of_all(source.device_mesh)
            made = op(whole_of(source.detach()), *args[1:], **kwargs)
            return map_tensors(lambda x: _everywhere(x, mesh), made)
    if is_of_some_ranks(source.device_mesh):
        return view_of_whole(op, args, kwargs)
    try:
        made = plain(*args, **kwargs)
    except RuntimeError:  # DTensor has no such view of shards
        return view_of_whole(op, args, kwargs)
    piece, views = piece_of(source), flatten(made)[0]
    if all(_is_stored(x) and shares_memory(piece_of(x), piece) for x in views):
        return made
    return view_of_whole(op, args, kwargs)


_VIEWS_OF_SHARDS = frozenset(
    {
        aten.alias.default, aten.detach.default, aten.permute.default, aten.t.default,
        aten.transpose.int, aten.unsqueeze.default,
    }
)  # fmt: skip
"""Views that every shard has."""


def _drawn(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Random numbers, drawn by every rank for whole tensors, of which it keeps what rank 0 drew."""
    like = _first_stored(flatten((args, kwargs))[0])
    if like is None:
        return plain(*args, **kwargs)
    mesh = like.device_mesh

    def blank(x: DTensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=piece_of(x).device)

    def kept(whole: Tensor) -> Tensor:
        same = whole.shape == like.shape
        placements = like.placements if same else [Replicate()] * mesh.ndim
        piece = cut_piece(_of_rank_0(whole, mesh), mesh, placements).clone()
        return dtensor_of(piece, whole, mesh, placements)

    wholes, made = _on_wholes(op, args, kwargs, blank)
    for x, whole in wholes:
        piece_of(x).copy_(cut_piece(_of_rank_0(whole, x.device_mesh), x.device_mesh, x.placements))
    back = {id(whole): x for x, whole in wholes}
    return map_tensors(lambda x: back[id(x)] if id(x) in back else kept(x), made)


def _computed_into(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What an op writes into arguments, computed for whole tensors."""
    like = _first_stored(written_by(op, args, kwargs))
    if like is None:
        return _written_elsewhere(plain, op, args, kwargs)
    args, kwargs = _replicated((args, kwargs), like)
    wholes, made = _on_wholes(op, args, kwargs, lambda x: whole_of(x).clone())
    for x, whole in wholes:
        piece_of(x).copy_(cut_piece(whole, x.device_mesh, x.placements))
    back = {id(whole): x for x, whole in wholes}
    return map_tensors(lambda x: back.get(id(x), x), made)


def _on_wholes(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    copied: Callable[[DTensor], Tensor],
) -> tuple[list[tuple[DTensor, Tensor]], Any]:
    """What an op makes of whole tensors, and those it was given for what it writes to."""
    wholes = {id(x): (x, copied(x)) for x in written_by(op, args, kwargs) if isinstance(x, DTensor)}

    def entire(x: Tensor) -> Tensor:
        return wholes[id(x)][1] if id(x) in wholes else whole_of(x)

    made = op(*map_tensors(entire, args), **map_tensors(entire, kwargs))
    return list(wholes.values()), made


def _assigned(tensor: DTensor, value: Tensor) -> Tensor | None:
    """What becomes the data of `tensor`, or its gradient, as this rank's piece."""
    if not _is_ours(tensor):
        return None
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise AutoparError(
            f"a parameter of a compiled model is {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"and its data and gradient stay so: {value.dtype} of shape {tuple(value.shape)} "
            "cannot take their place"
        )
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (
        tensor.device_mesh,
        tensor.placements,
    ):
        piece = piece_of(value)  # in the same memory, as on one device
    else:
        whole = whole_of(value)
        if not isinstance(value, DTensor):
            whole = _of_rank_0(whole, tensor.device_mesh)
        piece = cut_piece(whole, tensor.device_mesh, tensor.placements)
    return piece.detach().to(piece_of(tensor).device).contiguous()
