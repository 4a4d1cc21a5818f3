"""Ops of a script on parameters and gradients in shards, with the results of one device.

DTensor has the arithmetic. Here are the ops that it refuses, or that differ from one device:

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

All are collective calls: every rank makes them, since every rank runs the same script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import (
    Handler,
    TorchCall,
    cut_shard,
    dtensor_like,
    is_of,
    shard_of,
    take_over_assignments,
    take_over_copies,
    take_over_ops,
    take_over_wholes,
)
from autopar.runtime.module.readings import know_metrics, know_readings
from autopar.runtime.module.writes import (
    add_meshes,
    changed_shape,
    computed_into,
    drawn_whole,
    equal_everywhere,
    everywhere,
    is_beside,
    is_ours,
    is_simple,
    is_stored,
    on_all_ranks,
    replicated_beside,
    values_of_rank_0,
    written_by_element,
)
from autopar.runtime.op_schemas import (
    as_view,
    draws_numbers,
    is_distributed_call,
    is_in_place,
    is_on_lists,
    is_view,
)
from autopar.runtime.process.alone import is_differentiated, is_in_shards, jointly, whole_alone
from autopar.runtime.process.beside import rows_differ
from autopar.runtime.process.origins import count_changes, know_swaps, note
from autopar.runtime.process.part_tensors import is_of_some_ranks, mesh_of_all
from autopar.runtime.process.proven import (
    added_up,
    for_shards,
    is_by_element,
    is_proven,
    know_composites,
    takes_replicated,
)
from autopar.runtime.program.reads_whole import check_derivatives_of
from autopar.runtime.program.sharded import view_of_whole, whole_of
from autopar.runtime.program.sharded_ops import shares_memory
from autopar.runtime.replacing import once
from autopar.runtime.torch_private import (
    flatten,
    is_below_autograd,
    is_forward_mode,
    map_tensors,
)

aten = torch.ops.aten

_ROWS = (
    "{op} would compute a loss from parameters and a plain tensor outside of a compiled model "
    "whose ranks are handed rows of their own, and each would have a gradient of its rows: compute "
    'it in the forward of the model, or hand every rank the whole batch (inputs="global")'
)

_FORWARD = (
    "{op} of a tensor in shards is no view of them, as derivatives in forward mode need it: take "
    "those of x.full_tensor()"
)

_ops: set[str] = set()


def know_changes(meshes: Iterable[DeviceMesh]) -> None:
    """From now on DTensors on `meshes` behave as said above, in all ops that exist by now."""
    take_over_ops(_handler_of, _ops)
    know_metrics()
    _know_methods()
    add_meshes(meshes)


@once
def _know_methods() -> None:
    take_over_assignments(_assigned)
    take_over_copies(is_ours)
    take_over_wholes(_whole)
    know_readings(is_ours)
    know_composites()
    know_swaps()


def _whole(make: Callable[[DTensor], Tensor], x: DTensor) -> Tensor:
    """All of a DTensor, with its derivative in forward mode."""
    if is_forward_mode():
        if is_below_autograd():
            # Ops compute with the value alone, and of the derivative apart from it.
            x = dtensor_like(shard_of(x), x)
        else:
            value, derivative = forward_ad.unpack_dual(x)
            if isinstance(derivative, DTensor) and isinstance(value, DTensor):
                return forward_ad.make_dual(_whole(make, value), _whole(make, derivative))
    if not is_ours(x) or not is_in_shards(x):
        return make(x)
    with jointly("a read", [x]) as joint:
        return make(x) if joint else whole_alone(x)


def _handler_of(op: Any) -> Handler | None:
    if draws_numbers(op):
        return on_all_ranks(drawn_whole)
    if op is aten.detach_.default:
        return _detached
    if is_on_lists(op):
        return None
    if as_view(op) is not None:
        return on_all_ranks(changed_shape)
    if is_by_element(op) and is_in_place(op):
        return written_by_element
    if op._schema.is_mutable or is_distributed_call(op):
        return on_all_ranks(computed_into)
    if op in _CREATED:
        return _created
    if op is aten.is_set_to.default:
        return _is_set_to
    return _viewed if is_view(op) else _computed


_CREATED = frozenset(
    {
        aten.new_empty.default, aten.new_full.default, aten.new_ones.default,
        aten.new_zeros.default,
    }
)  # fmt: skip
"""Ops that create a tensor of any shape on the device of another one."""


def _detached(_: TorchCall, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Autograd has done it already. DTensor does not know the op in torch 2.11, where autograd
    calls it on a tensor that a custom function returns unchanged."""
    return args[0]


def _is_set_to(_: TorchCall, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> bool:
    """Two DTensors are the same memory if their shards are, and if mesh, placements and shape
    agree."""
    a, b = args
    if not (isinstance(a, DTensor) and isinstance(b, DTensor)):
        return False
    is_alike = (a.device_mesh, a.placements, a.shape) == (b.device_mesh, b.placements, b.shape)
    return is_alike and shard_of(a).is_set_to(shard_of(b))


def _created(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A tensor created like another one is sharded as that is if it has its shape, as
    `dcp.async_save` stages tensors. It is plain if it has another shape."""
    like, shape, *rest = args
    if not is_ours(like) or tuple(shape) == tuple(like.shape):
        return plain(*args, **kwargs)
    return op(shard_of(like), shape, *rest, **kwargs)


def _computed(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an op that changes nothing. On a rank that has nothing of a DTensor, torch's
    results can be relied on for elementwise ops alone."""
    check_derivatives_of(op)
    if is_by_element(op) and is_simple(args, kwargs):
        result = added_up(plain(*args, **kwargs))
        note(result, op, args, kwargs, view=False, is_here=not is_in_shards(result))
        return result
    given = flatten((args, kwargs))[0]
    like = next((x for x in given if is_ours(x)), None)
    if like is None:
        return plain(*args, **kwargs)
    if not any(is_beside(x, like) or is_in_shards(x) for x in given):
        return _together(plain, op, args, kwargs, given, like)
    with jointly(op, given) as joint:
        if not joint:
            return op(*map_tensors(whole_alone, args), **map_tensors(whole_alone, kwargs))
        result = _together(plain, op, args, kwargs, given, like)
    note(result, op, args, kwargs, view=False, is_here=not is_in_shards(result))
    return result


def _together(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
    given: Sequence[Any], like: DTensor,
) -> Any:  # fmt: skip
    mesh = like.device_mesh
    is_mixed = any(is_beside(x, like) for x in given)
    # A number, such as the loss, is that of all rows.
    is_of_rows = rows_differ and any(is_beside(x, like) and x.dim() for x in given)
    if is_of_rows and is_differentiated(given):
        raise AutoparError(_ROWS.format(op=op))
    if _is_on_shards(op, args, kwargs, given, is_mixed, mesh):
        if is_mixed:
            args, kwargs = replicated_beside((args, kwargs), like)
        return map_tensors(added_up, plain(*for_shards(op, args), **kwargs))

    def entire(x: Tensor) -> Tensor:
        return whole_of(x) if isinstance(x, DTensor) else equal_everywhere(whole_of(x), mesh)

    result = op(*map_tensors(entire, args), **map_tensors(entire, kwargs))
    return map_tensors(lambda x: everywhere(x, mesh_of_all(mesh)), result)


def _is_on_shards(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any],
    is_mixed: bool, mesh: DeviceMesh,
) -> bool:  # fmt: skip
    """Whether an op is done on shards, with plain tensors beside if it `is_mixed`."""
    if is_of_some_ranks(mesh):
        return is_by_element(op) and not is_mixed
    return is_proven(op, args, given) and (takes_replicated(op) or not is_mixed)


def _viewed(plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view, through which a script may write where autograd allows it."""
    source = args[0]
    if is_ours(source) and op in _OF_DUALS:
        return dtensor_like(shard_of(source), source)
    if is_ours(source) and op in _SAME and is_of(source.device_mesh):
        # Autograd does one for each gradient; through DTensor it takes 3 times as long. On ranks
        # outside of the mesh the result fits a parameter without elements.
        view = dtensor_like(op(shard_of(source)), source)
        note(view, op, args, kwargs, view=True, is_here=not is_in_shards(view))
        return view
    if is_ours(source) and op in _FLAGS:
        # The conjugate and negative flags of a view are not sent with its bytes.
        return dtensor_like(op(shard_of(source)).resolve_conj().resolve_neg(), source)
    if is_ours(source) and not is_stored(source) and op not in _VIEWS_OF_SHARDS:
        # Of strided shards, as flatten() makes some, DTensor has but few views.
        with suppress(*_NO_SUCH_VIEW):
            return plain(*args, **kwargs)
        return _computed(plain, op, args, kwargs)
    if not is_stored(source) or op in _VIEWS_OF_SHARDS or not is_in_shards(source):
        view = _view_of_shards(plain, op, args, kwargs)
    else:
        with jointly(op, [source]) as joint:
            if joint:
                view = _view_of_shards(plain, op, args, kwargs)
            elif is_fixed(source):
                return op(whole_alone(source), *args[1:], **kwargs)
            else:
                view = view_of_whole(op, args, kwargs)
    note(view, op, args, kwargs, view=True, is_here=not is_in_shards(view))
    return view


def _view_of_shards(
    plain: TorchCall, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    source = args[0]
    if not is_stored(source) or op in _VIEWS_OF_SHARDS:
        return plain(*args, **kwargs)
    mesh, view = source.device_mesh, None
    if source.numel() and not is_of_some_ranks(mesh):
        with suppress(*_NO_SUCH_VIEW):
            view = plain(*args, **kwargs)
    if is_fixed(source):
        if view is not None:
            return view
        view = op(whole_of(source.detach()), *args[1:], **kwargs)
        return map_tensors(lambda x: everywhere(x, mesh_of_all(mesh)), view)
    shard, views = shard_of(source), flatten(view)[0]
    if view is not None and all(is_stored(x) and shares_memory(shard_of(x), shard) for x in views):
        return view
    if is_forward_mode():
        raise AutoparError(_FORWARD.format(op=op))
    return view_of_whole(op, args, kwargs)


def is_fixed(source: Tensor) -> bool:
    """Whether autograd forbids writing to it, or to its views."""
    return torch.is_grad_enabled() and source.requires_grad and source.is_leaf


_NO_SUCH_VIEW = RuntimeError, AssertionError
"""What DTensor raises where it has no such view of shards."""

_OF_DUALS = frozenset({aten._fw_primal.default, aten._make_dual.default})
"""Ops that split a value and its derivative, or join them: below autograd both are the value."""

_SAME = frozenset({aten.alias.default, aten.detach.default})
"""Views of what their source is."""

_FLAGS = frozenset({aten._conj.default, aten._neg_view.default})

_VIEWS_OF_SHARDS = frozenset(
    {
        *_SAME, aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    }
)  # fmt: skip
"""Views that every shard has."""


def _assigned(tensor: DTensor, value: Tensor) -> Tensor | None:
    """This rank's shard of `value`, as the data of `tensor` or its gradient."""
    if not is_ours(tensor):
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
        shard = shard_of(value)  # in the same memory, as on one device
    else:
        with jointly("an assignment to .data or .grad", [tensor, value], reads=False):
            whole = whole_of(value)
            if not isinstance(value, DTensor):
                whole = values_of_rank_0(whole, tensor.device_mesh)
        shard = cut_shard(whole, tensor.device_mesh, tensor.placements)
    count_changes([tensor])
    return shard.detach().to(shard_of(tensor).device).contiguous()
