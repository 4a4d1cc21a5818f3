"""Properties of ops, from their schemas and tags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.torch_private import flatten


def is_pointwise(op: Any) -> bool:
    """Whether an op computes each element from those in its place, and draws nothing."""
    return torch.Tag.pointwise in op.tags and not draws_numbers(op)


def draws_numbers(op: Any) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def gives_tensors(op: Any) -> bool:
    """Whether an op returns tensors alone."""
    return all("Tensor" in str(result.type) for result in op._schema.returns)


def is_on_lists(op: Any) -> bool:
    """Whether an op is an optimizer's, on lists of tensors on any meshes."""
    return op.name().startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_"))


def is_in_place(op: Any) -> bool:
    """Whether an op writes values to an argument of its own, one tensor; not `has_out`."""
    name: str = op.name().removeprefix("aten::")
    if name.startswith(("_", "resize_", "set_", "requires_grad_", "retain_grad", "record_stream")):
        return False
    is_of_values = torch.Tag.inplace_view not in op.tags
    return op._schema.is_mutable and is_of_values and not has_out(op)


def has_out(op: Any) -> bool:
    """Whether an op writes its result into an argument that is there for nothing else."""
    return any(
        argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write
        for argument in op._schema.arguments
    )


def is_view(op: Any) -> bool:
    """Whether an op's result has the memory of an argument. `_unsafe_view`, which `kron` uses, does
    not declare it."""
    is_declared = any(result.alias_info is not None for result in op._schema.returns)
    return is_declared or op is torch.ops.aten._unsafe_view.default


def as_view(op: Any) -> Any:
    """The view op for an op that makes its argument a view in place (`squeeze` for `squeeze_`).
    None for other ops, or if there is none."""
    if torch.Tag.inplace_view not in op.tags or op is torch.ops.aten.detach_.default:
        return None
    name, _, overload = op.name().removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    names = (overload,) if overload else ("default", "int")  # `transpose_` is of `transpose.int`
    view = next((getattr(packet, x) for x in names if hasattr(packet, x)), None)
    return view if view is not None and is_view(view) else None


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments that an op writes to."""
    for index, argument in enumerate(op._schema.arguments):
        if _is_written(op, argument):
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (x for x in flatten(given)[0] if isinstance(x, Tensor))


def _is_written(op: Any, argument: Any) -> bool:
    if is_distributed_call(op):  # whose schemas do not declare it
        return op is not torch.ops.c10d.send.default and argument.name.startswith(_TAKES)
    return argument.alias_info is not None and argument.alias_info.is_write


_TAKES = ("output", "tensor")
"""How the names of arguments begin that collectives write to."""


def is_distributed_call(op: Any) -> bool:
    """Whether an op is a call of `torch.distributed`, such as `all_reduce`."""
    return op.namespace == "c10d"


def size_of_group(op: Any, args: Sequence[Any]) -> int:
    """How many ranks take part in a call of `torch.distributed`."""
    names = [argument.name for argument in op._schema.arguments]
    unbox: Any = dist.ProcessGroup.unbox
    return unbox(args[names.index("process_group")]).size()


def done(result: Any) -> Any:
    """The result of an op, once it is complete: collectives return before that."""
    for leaf in flatten(result)[0]:
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()  # pyright: ignore[reportAttributeAccessIssue]
    return result


def signature_of(op: Any) -> tuple[str, list[str]]:
    """The arguments of an op and the types of its results, as schemas write them:
    ("Tensor input, float p, bool? train", ["Tensor", "Tensor"])."""
    given, _, _ = str(op._schema).partition("(")[2].rpartition(") -> ")
    return given, [str(result.type) for result in op._schema.returns]
