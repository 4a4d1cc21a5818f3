"""Outputs in shards, which behave as the whole tensor.

A script of one device reads a model's logits as any tensor. On several ranks they stay in shards,
since no rank may have the memory to gather them. An op that DTensor does right, also with plain
tensors, runs on the shards. For any other op, for reads of values (`item`, `tolist`, `numpy`,
printing, saving), and on the way to another device, the tensor is gathered first. That is a
collective call, which every rank makes, since every rank runs the same script. Results are plain
tensors unless they are in shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import AutoparError
from autopar.runtime.dtensor_private import cut_shard, dtensor_of, local_of, shard_of
from autopar.runtime.op_schemas import (
    as_view,
    done,
    draws_numbers,
    is_distributed_call,
    is_view,
    written_by,
)
from autopar.runtime.process.alone import jointly, know_output, whole_alone
from autopar.runtime.process.origins import note
from autopar.runtime.process.part_tensors import is_of_some_ranks, of_rank_0
from autopar.runtime.process.proven import for_shards, is_proven
from autopar.runtime.program.reads_whole import ReadsWhole, check_derivatives_of
from autopar.runtime.program.sharded_ops import (
    NOWHERE,
    RESIZED,
    VIEWS,
    Copied,
    Place,
    changes_shards,
    check_distributed_call,
    leaves_mesh,
    needs_no_other,
    shares_memory,
    shares_place,
    takes_a_part,
)
from autopar.runtime.torch_private import (
    assigned_by,
    flatten,
    map_tensors,
    no_torch_function,
    reshape_wrapper,
    wrapper_of,
)

aten = torch.ops.aten


class ShardedOutput(ReadsWhole, Tensor):
    """A tensor of the shape and strides of the whole, `like`; this rank holds `shard` of it."""

    shard: Tensor
    place: Place
    view_of: Copied | None
    """Its base, if it is a whole copy where eager has a view: writes to either must be visible in
    the other."""
    writes: int
    """How often it was written to."""
    seen: int
    """How often its base was written to when its values were copied."""

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls, shard: Tensor, place: Place, like: Tensor, view_of: Copied | None = None
    ) -> ShardedOutput:
        self = wrapper_of(cls, like, shard.device)
        self.shard, self.place, self.view_of = _physical(shard), place, view_of
        self.writes = 0
        self.seen = _writes(_root(self))
        return self

    def __init__(self, *_: Any) -> None:
        """All is done where it is made."""

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if is_distributed_call(func):
            check_distributed_call(func, args)
        check_derivatives_of(func)
        if func is aten.is_set_to.default:
            return shares_place(*args)
        leaves = flatten((args, given))[0]
        reads = not (func._schema.is_mutable or draws_numbers(func))
        if reads and needs_no_other(func, args, leaves):
            result = _on_shards(func, args, given)
            if result is not NotImplemented and (not is_view(func) or _shares(result, args[0])):
                note(result, func, args, given, view=is_view(func))
                return result
        with jointly(func, leaves, reads=reads or not changes_shards(func, args, given)) as joint:
            if joint:
                result = _done_together(func, args, given)
            elif is_view(func):
                result = view_of_whole(func, args, given)  # of which no change may be lost
            else:
                return func(*map_tensors(whole_alone, args), **map_tensors(whole_alone, given))
        note(result, func, args, given, view=is_view(func))
        return result

    @property
    def in_shards(self) -> bool:
        """Whether other ranks have values that this one does not have."""
        return self.view_of is not None or _is_elsewhere(self) or not self._is_whole

    @property
    def _is_whole(self) -> bool:
        return all(p.is_replicate() for p in self.placements) and not _is_elsewhere(self)

    def full_tensor(self) -> Tensor:
        """The whole, plain tensor on every rank. A collective call."""
        return _Whole.apply(self)

    def to_dtensor(self) -> DTensor:
        """The DTensor of all ranks' shards, without gradient."""
        return _dtensor(self.detach())

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Those of the DTensor."""
        return self.place.placements

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """That of the DTensor."""
        return self.place.mesh

    def assign_data(self, value: Tensor) -> None:
        """`x.data = value`: the values of the whole are those of `value` from now on."""
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise AutoparError(
                f"an output in shards is {self.dtype} of shape {tuple(self.shape)}, and its data "
                f"stays so: {value.dtype} of shape {tuple(value.shape)} cannot take its place"
            )
        whole = whole_of(value.detach())
        whole = whole if isinstance(value, ShardedOutput | DTensor) else of_rank_0(whole)
        mesh = self.place.mesh
        # Memory of its own, as in eager: tensors that shared the previous memory keep their values.
        shard = whole if mesh is None else cut_shard(whole, mesh, self.placements)
        self.shard, self.view_of = (
            _physical(shard).clone(memory_format=torch.contiguous_format),
            None,
        )


assigned_by(ShardedOutput, ShardedOutput.assign_data)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, sharded: ShardedOutput
    ) -> Tensor:
        return whole_of(sharded)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> Tensor:
        return grad


def output(shard: Tensor, place: Place | None) -> Tensor:
    """The output of which a rank holds `shard`, as large as the others'; a plain tensor if that is
    all of it."""
    if place is None or (place.shape is None and all(p.is_replicate() for p in place.placements)):
        return shard
    assert place.mesh is not None
    shape = list(shard.shape if place.shape is None else place.shape)
    for size, placement in zip(place.mesh.shape, place.placements, strict=True):
        if isinstance(placement, Shard) and place.shape is None:
            shape[placement.dim] *= size
    sharded = ShardedOutput(shard, place, torch.empty(shape, dtype=shard.dtype, device="meta"))
    know_output(sharded)
    return sharded


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor, plain. A collective call if it is in shards."""
    if not isinstance(tensor, ShardedOutput):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not tensor.in_shards:
        return tensor.shard
    with jointly("a read", [tensor]) as joint:
        if not joint:
            return whole_alone(tensor)
        _refresh(tensor)
        return tensor.shard if tensor._is_whole else _dtensor(tensor).full_tensor()


def _shares(result: Any, source: ShardedOutput) -> bool:
    return isinstance(result, ShardedOutput) and shares_memory(result.shard, source.shard)


def _done_together(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if as_view(func) is not None:
        return _become(func, args, kwargs)
    if any(True for _ in written_by(func, args, kwargs)):
        return _written(func, args, kwargs)
    if is_view(func):
        return _view(func, args, kwargs)
    result = _on_shards(func, args, kwargs)
    if result is not NotImplemented:
        return result
    result = func(*map_tensors(whole_of, args), **map_tensors(whole_of, kwargs))
    return map_tensors(of_rank_0, result) if draws_numbers(func) else result


def _root(x: Tensor) -> ShardedOutput | DTensor:
    """The base of a view, through views that are copies."""
    while isinstance(x, ShardedOutput) and x.view_of is not None:
        x = x.view_of.args[0]
    assert isinstance(x, ShardedOutput | DTensor)
    return x


@torch.no_grad()
def _refresh(x: ShardedOutput) -> None:
    """Update a view that is a copy. A collective call, unless its base is an output that was not
    written to since. Writes to a DTensor are not counted."""
    if x.view_of is None:
        return
    root = _root(x)
    if isinstance(root, DTensor) or x.seen != root.writes:
        x.shard = _physical(x.view_of.apply_to(whole_of(x.view_of.args[0])))
        x.seen = _writes(root)


def _physical(x: Tensor) -> Tensor:
    """Its values in memory, without the conjugate and negative flags, which are lost when it is
    sent."""
    return x.resolve_conj().resolve_neg()


def _writes(root: ShardedOutput | DTensor) -> int:
    return 0 if isinstance(root, DTensor) else root.writes


def _is_elsewhere(x: ShardedOutput) -> bool:
    """Whether some ranks have nothing of it."""
    mesh = x.place.mesh
    return mesh is not None and is_of_some_ranks(mesh)


def _dtensor(x: Tensor) -> Any:
    if not isinstance(x, ShardedOutput):
        return x
    if x.place.mesh is not None and not x.dim():
        # `from_local` takes a shape without dims for None, and uses that of the shard instead.
        return dtensor_of(x.shard, x, x.place.mesh, x.placements)
    return DTensor.from_local(
        x.shard, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `func` on the shards. NotImplemented if DTensor cannot compute it, or may be
    able to on some ranks alone: all must do the same."""
    given = [x for x in flatten((args, kwargs))[0] if isinstance(x, ShardedOutput)]
    elsewhere = (_is_elsewhere(x) or leaves_mesh(x, kwargs.get("device")) for x in given)
    # DTensor does not terminate for views of tensors without elements.
    if any(elsewhere) or not all(x.numel() for x in given):
        return NotImplemented
    try:
        with torch.no_grad(), implicit_replication():
            args, kwargs = map_tensors(_dtensor, (args, kwargs))
            if not (func in VIEWS or is_proven(func, args, flatten((args, kwargs))[0])):
                return NotImplemented
            return map_tensors(_placed, func(*for_shards(func, args), **kwargs))
    except Exception:  # on whole tensors it works, or says what is wrong in torch's own words
        return NotImplemented


def _placed(result: Tensor) -> Tensor:
    """A result of DTensor's: reduced if it is partial, and a plain tensor if it is replicated."""
    if not isinstance(result, DTensor):
        return result
    placements = [Replicate() if p.is_partial() else p for p in result.placements]
    if any(type(p) not in (Shard, Replicate) for p in placements):
        raise NotImplementedError(f"{placements} is no way to hold an output")
    if all(p.is_replicate() for p in placements):
        return result.full_tensor()
    result = result.redistribute(placements=placements)
    return ShardedOutput(local_of(result), Place(result.device_mesh, result.placements), result)


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view of shards, or else one of a whole copy."""
    source = args[0]
    if func in VIEWS and isinstance(source, ShardedOutput) and not takes_a_part(func, args):
        view = _on_shards(func, args, kwargs)
        if _shares(view, source):
            return view
    return view_of_whole(func, args, kwargs)


def view_of_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view of a whole copy of its first argument, a ShardedOutput or a DTensor, to which writes
    to the view are copied. A collective call."""
    view = func(whole_of(args[0]), *args[1:], **kwargs)
    shape = args[0].shape
    if isinstance(view, Tensor):
        return ShardedOutput(view, NOWHERE, view, Copied(func, args, kwargs, None, shape))
    return [
        ShardedOutput(x, NOWHERE, x, Copied(func, args, kwargs, index, shape))
        for index, x in enumerate(view)
    ]


def _become(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that makes its argument a view of itself in place, such as `squeeze_`."""
    x, *rest = args
    before = ShardedOutput(x.shard, x.place, torch.empty_like(x, device="meta"), x.view_of)
    before.writes, before.seen = x.writes, x.seen
    view = _view(as_view(func), (before, *rest), kwargs)
    x.shard, x.place, x.view_of, x.seen = view.shard, view.place, view.view_of, view.seen
    reshape_wrapper(func, args, kwargs)
    return x


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op that writes into its arguments: on whole copies, from which each rank takes its
    shard."""
    copies: dict[int, Tensor] = {}
    written = [x for x in written_by(func, args, kwargs) if isinstance(x, ShardedOutput)]
    roots: list[tuple[ShardedOutput | DTensor, Tensor]] = []
    for x in written:
        root, views = _root(x), list[Copied]()
        view: Any = x
        while view is not root:
            views.append(view.view_of)
            view = view.view_of.args[0]
        copy = whole_of(root).clone()
        roots.append((root, copy))
        for view in reversed(views):
            copy = view.apply_to(copy)
        copies[id(x)] = copy

    def read(x: Tensor) -> Tensor:
        known = copies.get(id(x))
        return known if known is not None else whole_of(x) if isinstance(x, ShardedOutput) else x

    with implicit_replication():
        result = done(func(*map_tensors(read, args), **map_tensors(read, kwargs)))
    plain = any(type(x) is Tensor for x in flatten((args, kwargs))[0])
    if is_distributed_call(func):
        plain = False  # ranks may be given other values each
    if draws_numbers(func) or (plain and any(isinstance(root, DTensor) for root, _ in roots)):
        for copy in copies.values():
            copy.copy_(of_rank_0(copy))
    for root, copy in roots:
        if is_distributed_call(func) and isinstance(root, ShardedOutput):
            root.shard, root.place, root.writes = copy, NOWHERE, root.writes + 1
        else:
            _keep(root, copy)
    back: dict[int, Tensor] = {}
    for x in written:
        back[id(copies[id(x)])] = x
        if x.view_of is not None:
            _keep(x, copies[id(x)])
            x.seen = _writes(_root(x))
    return map_tensors(lambda x: back.get(id(x), x), result)


def _keep(x: ShardedOutput | DTensor, whole: Tensor) -> None:
    if whole.shape != x.shape:
        raise AutoparError(RESIZED.format(now=tuple(whole.shape), was=tuple(x.shape)))
    mesh, shard = x.device_mesh, shard_of(x) if isinstance(x, DTensor) else x.shard
    if isinstance(x, ShardedOutput):
        x.writes += 1
    shard.copy_(whole if mesh is None else cut_shard(whole, mesh, x.placements))
