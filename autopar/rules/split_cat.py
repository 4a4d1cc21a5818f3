"""Ops that cut dims into slices, join slices, and their backward.

A slice of a dim is *regular* when the dim is `(t! h)`, t slices of size h, and the slice is one of
them: h can then be sharded, and each rank has its part of every slice. A slice that is not regular
is computed whole; such an op is no view, so that its output can be sharded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.graph import Ref
from autopar.rules.notation import Call, Dim, Rule, dim_of, letters, linear, rule, singles
from autopar.rules.op import Changes, Family, LocalCall, Op, output_shape, reads_output_size


def _part(dim: int, start: int, length: int) -> tuple[Dim, Dim, dict[str, int], bool]:
    """(dims of the whole dim, of its slice, sizes, regular?) for elements [start, start+length)."""
    if length == dim:
        return ("h",), ("h",), {}, True
    if length and dim % length == 0 and start % length == 0:
        return ("t", "h"), ("h",), {"t": dim // length, "h": length}, True
    return ("t",), ("p",), {}, False


def _slice_dims(call: Call, dim_at: int, size: int) -> tuple[Dim, Dim, dict[str, int], bool]:
    """`_part` of a slice whose arguments follow `dim`."""
    start, end, step = (
        call.integer(dim_at + k, name, default)
        for k, name, default in ((1, "start", 0), (2, "end", size), (3, "step", 1))
    )
    bounds = range(size)[start:end:step]
    return _part(size, bounds.start, len(bounds)) if step == 1 else (("t",), ("p",), {}, False)


def slice_(call: Call) -> Rule:
    """aten.slice.Tensor(x, dim, start, end, step)."""
    shape = call.shapes[0]
    dim = dim_of(call.integer(1, "dim"), len(shape))
    full, part, sizes, view = _slice_dims(call, 1, shape[dim])
    names = singles(letters(len(shape)))
    return rule(
        [_with(names, dim, full)],
        [_with(names, dim, part)],
        whole=("t", "p"),
        partial=((0,),),
        view=view,
        sizes=sizes,
    )


def narrow(call: Call) -> Rule:
    """aten.narrow(x, dim, start, length)."""
    start, length = call.integer(2, "start"), call.integer(3, "length")
    return slice_(replace(call, args=(*call.args[:2], start, start + length), kwargs=()))


def slice_into(call: Call) -> Rule:
    """aten.slice_backward(grad, input_sizes, dim, start, end, step), aten.slice_scatter(x, source,
    dim, start, end, step): the last input becomes a slice of the output."""
    dim = dim_of(call.integer(2, "dim"), len(call.out))
    full, part, sizes, _ = _slice_dims(call, 2, call.out[dim])
    names = singles(letters(len(call.out)))
    target = _with(names, dim, full)
    return rule(
        [target, _with(names, dim, part)][-len(call.inputs) :],
        [target],
        whole=("t", "p"),
        partial=linear(call, _all_inputs(call)),
        sizes=sizes,
    )


def select(call: Call) -> Rule:
    """aten.select.int(x, dim, index), aten.unbind.int(x, dim): the dim is whole and gone."""
    shape = call.shapes[0]
    dim = dim_of(call.integer(1, "dim"), len(shape))
    names = singles(letters(len(shape)))
    rest = names[:dim] + names[dim + 1 :]
    return rule([names], [rest] * len(call.outputs), whole=names[dim], partial=((0,),), view=True)


def select_into(call: Call) -> Rule:
    """aten.select_backward(grad, input_sizes, dim, index), aten.select_scatter(x, source, dim,
    index)."""
    dim = dim_of(call.integer(2, "dim"), len(call.out))
    names = singles(letters(len(call.out)))
    rest = names[:dim] + names[dim + 1 :]
    inputs = [names, rest][-len(call.inputs) :]
    return rule(inputs, [names], whole=names[dim], partial=linear(call, _all_inputs(call)))


def split(call: Call) -> Rule:
    """aten.split.Tensor, aten.split_with_sizes: regular if the slices are equal."""
    shape = call.shapes[0]
    dim = dim_of(call.integer(2, "dim"), len(shape))
    full, parts, sizes, view = _parts([o.shape[dim] for o in call.outputs])
    names = singles(letters(len(shape)))
    return rule(
        [_with(names, dim, full)],
        [_with(names, dim, part) for part in parts],
        whole=("t", *letters(len(parts), "p")),
        partial=((0,),),
        view=view,
        sizes=sizes,
    )


def cat(call: Call) -> Rule | None:
    """aten.cat(tensors, dim): regular if the tensors are equal."""
    rank = len(call.out)
    if any(len(shape) != rank for shape in call.shapes):
        return None
    dim = dim_of(call.integer(1, "dim"), rank)
    names = singles(letters(rank))
    full, parts, sizes, _ = _parts([shape[dim] for shape in call.shapes])
    return rule(
        [_with(names, dim, part) for part in parts],
        [_with(names, dim, full)],
        whole=("t", *letters(len(parts), "p")),
        partial=linear(call, _all_inputs(call)),
        sizes=sizes,
    )


def stack(call: Call) -> Rule:
    """aten.stack(tensors, dim): the new dim is whole."""
    dim = dim_of(call.integer(1, "dim"), len(call.out))
    names = singles(letters(len(call.out)))
    inputs = [names[:dim] + names[dim + 1 :]] * len(call.inputs)
    return rule(inputs, [names], whole=names[dim], partial=linear(call, _all_inputs(call)))


def _all_inputs(call: Call) -> list[Ref]:
    return [Ref(k) for k in range(len(call.inputs))]


def _parts(lengths: Sequence[int]) -> tuple[Dim, list[Dim], dict[str, int], bool]:
    """(dims of the whole dim, of each slice, sizes, regular?) of a dim cut into `lengths`."""
    if len(lengths) == 1:
        return ("h",), [("h",)], {}, True
    if lengths[0] and len(set(lengths)) == 1:
        return ("t", "h"), [("h",)] * len(lengths), {"t": len(lengths), "h": lengths[0]}, True
    return ("t",), [(name,) for name in letters(len(lengths), "p")], {}, False


def _with(names: Sequence[Dim], dim: int, letters_there: Dim) -> tuple[Dim, ...]:
    return (*names[:dim], letters_there, *names[dim + 1 :])


def repeat(call: Call) -> Rule:
    """aten.repeat(x, repeats): an output dim is (copies, dim)."""
    shape, out = call.shapes[0], call.out
    lead = len(out) - len(shape)
    names = letters(len(out))
    sizes: dict[str, int] = {}
    result: list[Dim] = []
    for d, size in enumerate(out):
        own = shape[d - lead] if d >= lead else 1
        copies = size // own if own else 0
        sizes |= {f"r{d}": copies, names[d]: own}
        result.append(
            (names[d],) if copies == 1 else (f"r{d}",) if own == 1 else (f"r{d}", names[d])
        )
    return rule([singles(names[lead:])], [result], partial=linear(call, (Ref(0),)), sizes=sizes)


def _local_bounds(at: int, *, of_output: bool = False) -> Callable[[LocalCall], Changes]:
    """start and end, behind the dim at `at`, of a slice of the first input, or output.

    A sharded dim is (t! h) with slices of size h, so that bounds shrink as the dim does.
    """

    def changes(call: LocalCall) -> Changes:
        shapes, dim = call.shapes, call.dim(at)
        size = (shapes.outputs if of_output else shapes.inputs)[0][dim]
        here = (shapes.local_outputs if of_output else shapes.local_inputs)[0][dim]
        if size == here:
            return {}
        low, high, _ = slice(call.arg(at + 1, "start"), call.arg(at + 2, "end")).indices(size)
        return {(at + 1, "start"): low * here // size, (at + 2, "end"): high * here // size}

    return changes


def _local_slice_backward(call: LocalCall) -> Changes:
    return output_shape(1, "input_sizes")(call) | _local_bounds(2, of_output=True)(call)


def _local_narrow(call: LocalCall) -> Changes:
    dim = call.dim(1)
    size, here = call.shapes.inputs[0][dim], call.shapes.local_inputs[0][dim]
    return {
        (2, "start"): call.arg(2, "start") % size * here // size if size else 0,
        (3, "length"): call.shapes.local_outputs[0][dim],
    }


def _local_split(call: LocalCall) -> Changes:
    return {(1, "split_size"): call.shapes.local_outputs[0][call.dim(2)]}


def _local_split_with_sizes(call: LocalCall) -> Changes:
    dim = call.dim(2)
    return {(1, "split_sizes"): [shape[dim] for shape in call.shapes.local_outputs]}


def _local_repeat(call: LocalCall) -> Changes:
    source, result = call.shapes.local_inputs[0], call.shapes.local_outputs[0]
    padded = (1,) * (len(result) - len(source)) + source
    return {(1, "repeats"): [b // a if a else 1 for a, b in zip(padded, result, strict=True)]}


SPLIT_CAT: Family = (
    (Op(slice_, reads=reads_output_size, local_args=_local_bounds(1)), "slice.Tensor"),
    (Op(narrow, reads=reads_output_size, local_args=_local_narrow), "narrow"),
    (Op(select, reads=reads_output_size), "select.int unbind.int"),
    (Op(split, local_args=_local_split), "split.Tensor unsafe_split.Tensor"),
    (Op(split, local_args=_local_split_with_sizes), "split_with_sizes"),
    (Op(slice_into, local_args=_local_slice_backward), "slice_backward"),
    (Op(slice_into, local_args=_local_bounds(2, of_output=True)), "slice_scatter"),
    (Op(select_into, local_args=output_shape(1, "input_sizes")), "select_backward"),
    (Op(select_into), "select_scatter"),
    (Op(cat), "cat"),
    (Op(stack), "stack"),
    (Op(repeat, local_args=_local_repeat), "repeat"),
)
