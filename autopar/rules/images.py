"""Ops on images and signals: convolutions, pooling, padding, resampling.

Batch and channels are parallel; dims of space are whole, for a point of the output needs its
neighbours.
"""

from __future__ import annotations

from math import prod
from typing import cast

from autopar.ir.graph import Graph, Node, Ref
from autopar.rules.notation import (
    Call,
    Dim,
    Dims,
    Rule,
    RuleFunction,
    backward,
    letters,
    linear,
    linear_in,
    place,
    rule,
    singles,
)
from autopar.rules.op import Changes, Family, LocalCall, Op, output_shape, reads_shape_of


def planes(space: int, joint: str = "") -> RuleFunction:
    """The last `space` dims are whole in every tensor, those before them parallel. `joint` lists
    sets of arguments in which the op is jointly linear."""

    def function(call: Call) -> Rule | None:
        lead = letters(len(call.out) - space)
        shapes = [t.shape for t in (*call.inputs, *call.outputs)]
        if any(len(shape) < len(lead) for shape in shapes):
            return None
        marks = [letters(len(s) - len(lead), f"x{k}_") for k, s in enumerate(shapes)]
        dims = [singles((*lead, *mark)) for mark in marks]
        split = len(call.inputs)
        return rule(
            dims[:split],
            dims[split:],
            whole=[a for mark in marks for a in mark],
            partial=linear_in(call, joint),
        )

    return function


def convolution(call: Call) -> Rule | None:
    """aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding,
    groups): the input channels are summed where no bias would be added more than once."""
    transposed, groups = bool(call.arg(6, "transposed")), call.integer(8, "groups", 1)
    dims = _convolution_dims(call, 0, 1, transposed=transposed, groups=groups)
    if dims is None:
        return None
    source, weight, result, whole, sizes = dims
    if isinstance(call.arg(2), Ref):
        whole |= {"c"}
    inputs = place(call, {0: source, 1: weight, 2: (result[1],)})
    return rule(inputs, [result], whole=whole, sizes=sizes)


def convolution_backward(call: Call) -> Rule | None:
    """aten.convolution_backward(grad, x, weight, bias_sizes, stride, padding, dilation, transposed,
    output_padding, groups, mask)."""
    transposed, groups = bool(call.arg(7, "transposed")), call.integer(9, "groups", 1)
    dims = _convolution_dims(call, 1, 2, transposed=transposed, groups=groups)
    if dims is None:
        return None
    source, weight, result, whole, sizes = dims
    if cast("tuple[bool, ...]", call.arg(10, "output_mask"))[2]:
        whole |= {"c"}
    inputs, outputs = {0: result, 1: source, 2: weight}, [source, weight, (result[1],)]
    return backward(call, inputs, outputs, 10, whole=whole, sizes=sizes)


def _convolution_dims(
    call: Call, at: int, weight_at: int, *, transposed: bool, groups: int
) -> tuple[Dims, Dims, Dims, set[str], dict[str, int]] | None:
    """Dims of x, of the weight and of the result; whole letters; sizes. Channels are `(g c)` and
    `(g o)`, and only the weight's second dim stands in a group's own."""
    shape = call.shape(call.arg(weight_at))
    space = len(shape) - 2
    if len(call.shape(call.arg(at))) != space + 2:
        return None
    spaces = [singles(letters(space, mark)) for mark in "ikj"]
    inside: Dim = ("g", "c") if groups > 1 else ("c",)
    outside: Dim = ("g", "o") if groups > 1 else ("o",)
    first, second = shape[0] // groups, shape[1]
    sizes = {"g": groups, "c": first, "o": second} if transposed else {}
    sizes = sizes or {"g": groups, "c": second, "o": first}
    pair: tuple[Dim, Dim] = (inside, ("o",)) if transposed else (outside, ("c",))
    return (
        (("n",), inside, *spaces[0]),
        (*pair, *spaces[1]),
        (("n",), outside, *spaces[2]),
        {a for dims in spaces for dim in dims for a in dim},
        sizes if groups > 1 else {},
    )


def grid_sampler(call: Call) -> Rule:
    """aten.grid_sampler_2d(x, grid, ...), and in three dims: each point of the grid reads all of
    the image."""
    image, grid, result, whole = _grid_dims(call, 0)
    inputs = place(call, {0: image, 1: grid})
    return rule(inputs, [result], whole=whole, partial=linear(call, (call.arg(0),)))


def grid_sampler_backward(call: Call) -> Rule:
    """aten.grid_sampler_2d_backward(grad, x, grid, interpolation, padding, align, mask)."""
    image, grid, result, whole = _grid_dims(call, 1)
    return backward(call, {0: result, 1: image, 2: grid}, [image, grid], 6, whole=whole)


def _grid_dims(call: Call, at: int) -> tuple[Dims, Dims, Dims, set[str]]:
    """Dims of the image, argument `at`, of the grid and of the result; whole letters."""
    space = len(call.shape(call.arg(at))) - 2
    pixels, points = letters(space, "i"), letters(space, "p")
    return (
        singles(("n", "c", *pixels)),
        singles(("n", *points, "w")),
        singles(("n", "c", *points)),
        {*pixels, "w"},
    )


def _convolution_flops(node: Node, graph: Graph) -> float:
    """FLOPs: one multiplication per weight and pixel of the strided side. That is the result, or,
    if transposed, the input. Backward does as much per requested gradient."""
    types = graph.input_types(node)
    if "backward" in node.op:
        result, x, weight = types[:3]
        transposed, mask = node.args[7], cast("tuple[bool, ...]", node.args[10])
        times = sum(map(bool, mask[:2]))
    else:
        x, weight, result, transposed, times = *types[:2], node.outputs[0], node.args[6], 1
    side = (x if transposed else result).shape
    return 2.0 * times * side[0] * prod(side[2:]) * prod(weight.shape)


def _local_groups(at: int, channels: int, weight: tuple[int, ...]) -> Changes:
    """The groups of a convolution: `channels`, of x or, transposed, of the result, in groups of the
    weight's second dim."""
    return {(at, "groups"): channels // weight[1] if weight[1] else 1}


def _local_convolution(call: LocalCall) -> Changes:
    shapes = call.shapes
    of = shapes.local_outputs[0] if call.arg(6, "transposed") else shapes.local_inputs[0]
    return _local_groups(8, of[1], shapes.local_inputs[1])


def _local_convolution_backward(call: LocalCall) -> Changes:
    """Bias has one element per channel of the gradient."""
    grad, x, weight = call.shapes.local_inputs[:3]
    of = grad if call.arg(7, "transposed") else x
    changes = _local_groups(9, of[1], weight)
    if call.arg(3, "bias_sizes") is not None:
        changes[3, "bias_sizes"] = [grad[1]]
    return changes


IMAGES: Family = (
    (
        Op(planes(1, "0")),
        "reflection_pad1d replication_pad1d avg_pool1d",
    ),
    (
        Op(planes(1, "0"), reads=reads_shape_of(1)),
        "reflection_pad1d_backward replication_pad1d_backward",
    ),
    (
        Op(planes(2, "0")),
        """_adaptive_avg_pool2d avg_pool2d reflection_pad2d replication_pad2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa""",
    ),
    (
        Op(planes(2, "0"), reads=reads_shape_of(1)),
        """_adaptive_avg_pool2d_backward avg_pool2d_backward reflection_pad2d_backward
        replication_pad2d_backward max_pool2d_with_indices_backward adaptive_max_pool2d_backward
        fractional_max_pool2d_backward""",
    ),
    (
        Op(planes(3, "0")),
        "_adaptive_avg_pool3d avg_pool3d reflection_pad3d replication_pad3d",
    ),
    (
        Op(planes(3, "0"), reads=reads_shape_of(1)),
        """_adaptive_avg_pool3d_backward avg_pool3d_backward reflection_pad3d_backward
        replication_pad3d_backward max_pool3d_with_indices_backward adaptive_max_pool3d_backward
        fractional_max_pool3d_backward""",
    ),
    (Op(planes(2)), "max_pool2d_with_indices adaptive_max_pool2d fractional_max_pool2d"),
    (Op(planes(3)), "max_pool3d_with_indices adaptive_max_pool3d fractional_max_pool3d"),
    (
        Op(planes(2, "0"), local_args=output_shape(2, "input_size")),
        "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
    ),
    (Op(convolution, _convolution_flops, local_args=_local_convolution), "convolution"),
    (
        Op(
            convolution_backward,
            _convolution_flops,
            local_args=_local_convolution_backward,
        ),
        "convolution_backward",
    ),
    (Op(grid_sampler), "grid_sampler_2d grid_sampler_3d"),
    (Op(grid_sampler_backward), "grid_sampler_2d_backward grid_sampler_3d_backward"),
)
