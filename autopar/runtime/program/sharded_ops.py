"""Properties of ops on outputs in shards, and errors for ops that cannot run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import AutoparError
from autopar.runtime.op_schemas import draws_numbers, size_of_group, written_by
from autopar.runtime.process.layouts import is_sharded_tensor
from autopar.runtime.process.proven import is_by_element
from autopar.runtime.torch_private import flatten

aten, c10d = torch.ops.aten, torch.ops.c10d

VIEWS = frozenset(
    {
        aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default,
        aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.t.default,
        aten.transpose.int, aten._unsafe_view.default, aten.unsqueeze.default,
        aten.view.default,
    }
)  # fmt: skip
"""Views that shards have, if they do not change sharded dims."""

_LOCAL_VIEWS = frozenset(
    {
        aten.alias.default, aten.detach.default, aten.permute.default, aten.select.int,
        aten.slice.Tensor, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    }
)  # fmt: skip
"""Those that every rank has of its own shard."""


class Place(NamedTuple):
    """Where the shards of a tensor are: DTensor's placements on a mesh. `shape` is that of the
    whole if some ranks are outside of the mesh, and have no shard that shows it."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    shape: tuple[int, ...] | None = None


NOWHERE = Place(None, ())


class Copied(NamedTuple):
    """A view that was taken of a whole copy of its first argument; the `index`-th, if an op gives
    several."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    index: int | None
    shape: torch.Size

    def apply_to(self, source: Any) -> Any:
        """The same view of another tensor."""
        if source.shape != self.shape:
            raise AutoparError(RESHAPED.format(op=self.func, was=tuple(self.shape)))
        result = self.func(source, *self.args[1:], **self.kwargs)
        return result if self.index is None else result[self.index]


RESIZED = (
    "what is written into a tensor in shards has the shape {now}, and it stays {was}: take a "
    "result of its own (without out=, x = x.op()), or out= of that shape"
)


_OF_A_ROOT = {c10d.gather_.default: 0, c10d.scatter_.default: 1}
"""Collectives with an argument that one rank alone passes, and which it is."""

_EQUAL = frozenset(
    {
        c10d.allreduce_.default, c10d.allreduce_coalesced_.default, c10d.broadcast_.default,
        c10d.allgather_.default, c10d._allgather_base_.default,
        c10d.allgather_coalesced_.default, c10d.allgather_into_tensor_coalesced_.default,
    }
)  # fmt: skip
"""Collectives that give all ranks the same."""

_BETWEEN_TWO = frozenset({c10d.send.default, c10d.recv_.default, c10d.recv_any_source_.default})

_ALONE = (
    "{op} is given tensors in shards by some ranks alone, which the others have to put together "
    "with them: take x = x.full_tensor() on all ranks before"
)

_UNEQUAL = (
    "{op} would give each rank other values of a parameter, gradient or state that ranks hold "
    "shards of: give it a plain tensor, such as x.full_tensor(), to write to"
)


def check_distributed_call(op: Any, args: Sequence[Any]) -> None:
    """AutoparError if a call of `torch.distributed` is given tensors in shards that not all ranks
    pass, or would leave shards of tensors that differ between ranks."""
    alone = args[_OF_A_ROOT[op]] if op in _OF_A_ROOT else ()
    is_of_some = op in _BETWEEN_TWO or size_of_group(op, args) < dist.get_world_size()
    if any(is_sharded_tensor(x) for x in flatten(args if is_of_some else alone)[0]):
        raise AutoparError(_ALONE.format(op=op))
    if op not in _EQUAL and any(isinstance(x, DTensor) for x in written_by(op, args, {})):
        raise AutoparError(_UNEQUAL.format(op=op))


RESHAPED = (
    "{op} took a view of a tensor in shards of shape {was}, which was given another shape in place "
    "since: take views after that, or write x = x.squeeze(0) instead of x.squeeze_(0)"
)


def leaves_mesh(x: Tensor, device: torch.device | None) -> bool:
    """Whether an op moves `x` to a kind of device that is not its mesh's: DTensor would move it
    back at the next op."""
    return device is not None and device.type != x.device.type


def needs_no_other(func: Any, args: Sequence[Any], leaves: Sequence[Any]) -> bool:
    """Whether each rank can compute its shard of the result from its own shards."""
    if func in _LOCAL_VIEWS:
        return hasattr(args[0], "shard") and not takes_a_part(func, args)
    given = [x for x in leaves if isinstance(x, Tensor)]
    place, shape = getattr(given[0], "place", None), given[0].shape
    return is_by_element(func) and all(
        (getattr(x, "place", NOWHERE), x.shape) == (place, shape) for x in given
    )


def changes_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op writes to a tensor in shards, or draws."""
    written = written_by(func, args, kwargs)
    return draws_numbers(func) or any(is_sharded_tensor(x) for x in written)


def takes_a_part(func: Any, args: Sequence[Any]) -> bool:
    """Whether a view takes a part of a sharded dim."""
    if func not in (aten.select.int, aten.slice.Tensor):
        return False
    dim = args[1] % args[0].dim() if len(args) > 1 else 0
    return any(p.is_shard(dim) for p in args[0].placements)


def shares_place(x: Any, y: Any) -> bool:
    """`x.is_set_to(y)`: whether two tensors are the same part of the same memory."""
    a, b = (getattr(each, "shard", None) for each in (x, y))
    return a is not None and b is not None and x.place == y.place and a.is_set_to(b)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are views of one."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
