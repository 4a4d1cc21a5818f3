"""The arguments of an op on the tensors of one rank: those that speak of shapes follow the local.

`localize` knows nothing of plans or graphs: shapes of inputs and outputs, whole and local, are all
it reads. To add an op that takes sizes or bounds, write one entry in `_TABLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the tensor inputs and outputs of an op, in order: `whole`, and on one rank."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    local_inputs: tuple[Shape, ...]
    local_outputs: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    shapes: Shapes

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def dim(self, position: int) -> int:
        """The dim in argument `position`, counted from the front of the whole side."""
        value = self.arg(position, "dim", 0)
        rank = max(map(len, (*self.shapes.inputs, *self.shapes.outputs)))
        return value % rank


Changes = dict[tuple[int, str], Any]
"""New values of arguments, by position and name."""


def localize(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(op, args, kwargs) that compute on local tensors what `target(*args, **kwargs)` computes on
    whole ones. Tensors among the arguments are not looked at, and stay where they are."""
    name = str(target)
    if name in _RESHAPES:
        # Local strides may differ from the traced ones, so that a view need not be possible; and
        # a dim that a rank holds one element of is not a dim of size 1.
        return aten.reshape.default, (args[0], list(shapes.local_outputs[0])), {}
    entry = _TABLE.get(name)
    if entry is None:
        return target, tuple(args), dict(kwargs)
    new_args, new_kwargs = list(args), dict(kwargs)
    for (position, keyword), value in entry(_Call(args, kwargs, shapes)).items():
        if position < len(new_args):
            new_args[position] = value
        else:
            new_kwargs[keyword] = value
    return target, tuple(new_args), new_kwargs


def _output_shape(position: int, name: str) -> Callable[[_Call], Changes]:
    return lambda call: {(position, name): list(call.shapes.local_outputs[0])}


def _scaled_bounds(call: _Call, at: int, whole: Shape, local: Shape) -> Changes:
    """start and end, behind dim at `at`, of a slice of a dim of `whole` size that is `local` here.

    A dim that is cut is (t! h) with pieces of whole h, so that bounds shrink as the dim does.
    """
    dim = call.dim(at)
    size, here = whole[dim], local[dim]
    if size == here:
        return {}
    start = call.arg(at + 1, "start")
    end = call.arg(at + 2, "end")
    low, high, _ = slice(start, end).indices(size)
    return {
        (at + 1, "start"): low * here // size,
        (at + 2, "end"): high * here // size,
    }


def _slice(call: _Call) -> Changes:
    return _scaled_bounds(call, 1, call.shapes.inputs[0], call.shapes.local_inputs[0])


def _slice_backward(call: _Call) -> Changes:
    whole, local = call.shapes.outputs[0], call.shapes.local_outputs[0]
    return {(1, "input_sizes"): list(local), **_scaled_bounds(call, 2, whole, local)}


def _slice_scatter(call: _Call) -> Changes:
    return _scaled_bounds(call, 2, call.shapes.outputs[0], call.shapes.local_outputs[0])


def _narrow(call: _Call) -> Changes:
    dim = call.dim(1)
    size, here = call.shapes.inputs[0][dim], call.shapes.local_inputs[0][dim]
    start = call.arg(2, "start") % size if size else 0
    return {
        (2, "start"): start * here // size if size else 0,
        (3, "length"): call.shapes.local_outputs[0][dim],
    }


def _split(call: _Call) -> Changes:
    return {(1, "split_size"): call.shapes.local_outputs[0][call.dim(2)]}


def _split_with_sizes(call: _Call) -> Changes:
    dim = call.dim(2)
    return {(1, "split_sizes"): [shape[dim] for shape in call.shapes.local_outputs]}


def _repeat(call: _Call) -> Changes:
    source, result = call.shapes.local_inputs[0], call.shapes.local_outputs[0]
    padded = (1,) * (len(result) - len(source)) + source
    return {(1, "repeats"): [b // a if a else 1 for a, b in zip(padded, result, strict=True)]}


def _group_norm(at: int, x: int, statistics: int | None) -> Callable[[_Call], Changes]:
    """N, C and, behind HxW, the number of groups, which the statistics have one column each of:
    outputs in forward, input `statistics` in backward."""

    def changes(call: _Call) -> Changes:
        shapes = call.shapes
        batch, channels = shapes.local_inputs[x][:2]
        columns = shapes.local_outputs[1] if statistics is None else shapes.local_inputs[statistics]
        return {(at, "N"): batch, (at + 1, "C"): channels, (at + 3, "group"): columns[1]}

    return changes


def _groups(at: int, channels: int, weight: Shape) -> Changes:
    """The groups of a convolution: `channels`, of x or, transposed, of the result, in groups of the
    weight's second dim."""
    return {(at, "groups"): channels // weight[1] if weight[1] else 1}


def _convolution(call: _Call) -> Changes:
    shapes = call.shapes
    of = shapes.local_outputs[0] if call.arg(6, "transposed") else shapes.local_inputs[0]
    return _groups(8, of[1], shapes.local_inputs[1])


def _convolution_backward(call: _Call) -> Changes:
    """Bias has one element per channel of the gradient."""
    grad, x, weight = call.shapes.local_inputs[:3]
    of = grad if call.arg(7, "transposed") else x
    changes = _groups(9, of[1], weight)
    if call.arg(3, "bias_sizes") is not None:
        changes[3, "bias_sizes"] = [grad[1]]
    return changes


def _new_empty_strided(call: _Call) -> Changes:
    """Dims in the same order in memory, without the gaps that a part would have."""
    shape = call.shapes.local_outputs[0]
    asked = call.arg(2, "stride")
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (asked[d], -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return {(1, "size"): list(shape), (2, "stride"): strides}


def _upsample_backward(call: _Call) -> Changes:
    return {(2, "input_size"): list(call.shapes.local_outputs[0])}


_RESHAPES = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "_unsafe_view.default",
        "reshape.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
    )
)

_TABLE: dict[str, Callable[[_Call], Changes]] = {
    "aten.expand.default": _output_shape(1, "size"),
    "aten.new_zeros.default": _output_shape(1, "size"),
    "aten.new_ones.default": _output_shape(1, "size"),
    "aten.new_empty.default": _output_shape(1, "size"),
    "aten.new_full.default": _output_shape(1, "size"),
    "aten.new_empty_strided.default": _new_empty_strided,
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_backward.default": _output_shape(1, "input_sizes"),
    "aten.narrow.default": _narrow,
    "aten.split.Tensor": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.repeat.default": _repeat,
    "aten.native_group_norm.default": _group_norm(3, 0, None),
    "aten.native_group_norm_backward.default": _group_norm(5, 1, 2),
    "aten._upsample_bilinear2d_aa_backward.default": _upsample_backward,
    "aten._upsample_bicubic2d_aa_backward.default": _upsample_backward,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}
