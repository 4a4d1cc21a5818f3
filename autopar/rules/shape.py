"""Rules of ops that rearrange elements: views, pieces and their backward, joins, new tensors.

A piece of a dim is *regular* when the dim is `(t! h)`, t pieces of size h, and the piece is made of
whole ones: h can then be sharded, each rank holding its part of every piece. A piece that is not
regular is computed whole; such an op is no view, so that what it leaves can be cut again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from autopar.ir.graph import Arg, Ref
from autopar.rules.call import (
    Call,
    aligned,
    dim_of,
    letters,
    linear,
    rule,
    singles,
)
from autopar.rules.notation import Dim, Rule


def identity_view(call: Call) -> Rule:
    """The same tensor under another name."""
    dims = singles(letters(len(call.out)))
    return rule([dims], [dims], partial=((0,),), view=True)


def permute_view(order: Sequence[int], call: Call) -> Rule:
    """Dim i of the output is dim `order[i]` of the input."""
    dims = singles(letters(len(call.out)))
    return rule([dims], [[dims[d] for d in order]], partial=((0,),), view=True)


def transpose(call: Call) -> Rule:
    """aten.transpose.int(x, dim0, dim1), aten.t(x)."""
    rank = len(call.out)
    first, second = (
        (dim_of(call.integer(k, f"dim{k - 1}"), rank) for k in (1, 2))
        if len(call.args) > 1
        else (0, rank - 1)
    )
    order = list(range(rank))
    if rank:
        order[first], order[second] = order[second], order[first]
    return permute_view(order, call)


def permute(call: Call) -> Rule:
    """aten.permute(x, dims)."""
    order = call.integers(1, "dims") or ()
    return permute_view([dim_of(d, len(order)) for d in order], call)


def expand(call: Call) -> Rule:
    """aten.expand(x, size): a repeated dim is a letter of the output alone."""
    names = letters(len(call.out))
    source = aligned(call.shapes[0], call.out, names)
    return rule([source], [singles(names)], partial=((0,),), view=True)


def reshape(call: Call) -> Rule:
    """aten.view and its kin: the common refinement of the dims before and after.

    Dims that have none, such as 4 x 3 -> 6 x 2, are whole on both sides.
    """
    before, after = call.shapes[0], call.out
    source: list[Dim] = [()] * len(before)
    result: list[Dim] = [()] * len(after)
    whole: list[str] = []
    sizes: dict[str, int] = {}
    view = 0 not in before
    for left, right in _segments(before, after):
        factors = _refine([before[d] for d in left], [after[d] for d in right])
        if factors is None:
            view = False
            for dims, side, mark in ((left, source, "i"), (right, result, "o")):
                for d in dims:
                    side[d] = (f"{mark}{d}",)
                    whole.append(f"{mark}{d}")
            continue
        names = [f"d{len(sizes) + i}" for i in range(len(factors))]
        sizes.update(zip(names, factors, strict=True))
        for dims, side, shape in ((left, source, before), (right, result, after)):
            rest = list(names)
            for d in dims:
                side[d] = _take(rest, sizes, shape[d])
    return rule([source], [result], whole=whole, partial=((0,),), view=view, sizes=sizes)


def _take(names: list[str], sizes: dict[str, int], size: int) -> Dim:
    taken: list[str] = []
    while prod(sizes[a] for a in taken) < size:
        taken.append(names.pop(0))
    return tuple(taken)


def _segments(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims on both sides with equal products; dims of size 1 left out."""
    if 0 in before:
        return [(list(range(len(before))), list(range(len(after))))]
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    while left:
        run_left, run_right = [left.pop(0)], [right.pop(0)]
        while (a := prod(before[d] for d in run_left)) != (b := prod(after[d] for d in run_right)):
            if a < b:
                run_left.append(left.pop(0))
            else:
                run_right.append(right.pop(0))
        found.append((run_left, run_right))
    return found


def _refine(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """The factors, outermost first, of which both sides are products; None if there are none."""
    if 0 in left:
        return None
    marks = {prod(side[: i + 1]) for side in (left, right) for i in range(len(side))}
    ordered = [1, *sorted(marks)]
    if any(b % a for a, b in pairwise(ordered)):
        return None
    return [b // a for a, b in pairwise(ordered)]


def _piece(dim: int, start: int, length: int) -> tuple[Dim, Dim, dict[str, int], bool]:
    """(dims of the whole dim, of its piece, sizes, regular?) for elements [start, start+length)."""
    if length == dim:
        return ("h",), ("h",), {}, True
    if length and dim % length == 0 and start % length == 0:
        return ("t", "h"), ("h",), {"t": dim // length, "h": length}, True
    return ("t",), ("p",), {}, False


def _slice_bounds(call: Call, dim_at: int, size: int) -> tuple[int, int, int]:
    """(start, end, step) of a slice whose arguments follow `dim`, within [0, size]."""
    start = call.integer(dim_at + 1, "start", 0)
    end = call.integer(dim_at + 2, "end", size)
    step = call.integer(dim_at + 3, "step", 1)
    bounds = range(size)[slice(start, end, step)]
    return bounds.start, bounds.stop, step


def _slice_dims(call: Call, dim_at: int, size: int) -> tuple[Dim, Dim, dict[str, int], bool]:
    start, end, step = _slice_bounds(call, dim_at, size)
    if step != 1:
        return ("t",), ("p",), {}, False
    return _piece(size, start, max(0, end - start))


def slice_(call: Call) -> Rule:
    """aten.slice.Tensor(x, dim, start, end, step)."""
    shape = call.shapes[0]
    dim = dim_of(call.integer(1, "dim"), len(shape))
    full, piece, sizes, view = _slice_dims(call, 1, shape[dim])
    names = singles(letters(len(shape)))
    return rule(
        [_with(names, dim, full)],
        [_with(names, dim, piece)],
        whole=("t", "p"),
        partial=((0,),),
        view=view,
        sizes=sizes,
    )


def narrow(call: Call) -> Rule:
    """aten.narrow(x, dim, start, length)."""
    start, length = call.integer(2, "start"), call.integer(3, "length")
    args = (*call.args[:2], start, start + length)
    return slice_(Call(call.op, args, (), call.inputs, call.outputs))


def slice_backward(call: Call) -> Rule:
    """aten.slice_backward(grad, input_sizes, dim, start, end, step)."""
    dim = dim_of(call.integer(2, "dim"), len(call.out))
    full, piece, sizes, _ = _slice_dims(call, 2, call.out[dim])
    names = singles(letters(len(call.out)))
    return rule(
        [_with(names, dim, piece)],
        [_with(names, dim, full)],
        whole=("t", "p"),
        partial=linear(call, (Ref(0),)),
        sizes=sizes,
    )


def slice_scatter(call: Call) -> Rule:
    """aten.slice_scatter(x, source, dim, start, end, step)."""
    dim = dim_of(call.integer(2, "dim"), len(call.out))
    full, piece, sizes, _ = _slice_dims(call, 2, call.out[dim])
    names = singles(letters(len(call.out)))
    target = _with(names, dim, full)
    return rule(
        [target, _with(names, dim, piece)],
        [target],
        whole=("t", "p"),
        partial=linear(call, (Ref(0), Ref(1))),
        sizes=sizes,
    )


def select(call: Call) -> Rule:
    """aten.select.int(x, dim, index), aten.unbind.int(x, dim): the dim is whole and gone."""
    shape = call.shapes[0]
    dim = dim_of(call.integer(1, "dim"), len(shape))
    names = singles(letters(len(shape)))
    rest = names[:dim] + names[dim + 1 :]
    return rule([names], [rest] * len(call.outputs), whole=names[dim], partial=((0,),), view=True)


def select_backward(call: Call) -> Rule:
    """aten.select_backward(grad, input_sizes, dim, index)."""
    dim = dim_of(call.integer(2, "dim"), len(call.out))
    names = singles(letters(len(call.out)))
    rest = names[:dim] + names[dim + 1 :]
    return rule([rest], [names], whole=names[dim], partial=linear(call, (Ref(0),)))


def select_scatter(call: Call) -> Rule:
    """aten.select_scatter(x, source, dim, index)."""
    dim = dim_of(call.integer(2, "dim"), len(call.out))
    names = singles(letters(len(call.out)))
    rest = names[:dim] + names[dim + 1 :]
    partial = linear(call, (Ref(0), Ref(1)))
    return rule([names, rest], [names], whole=names[dim], partial=partial)


def split(call: Call) -> Rule:
    """aten.split.Tensor, aten.split_with_sizes: regular if the pieces are equal."""
    shape = call.shapes[0]
    dim = dim_of(call.integer(2, "dim"), len(shape))
    pieces = [o.shape[dim] for o in call.outputs]
    full, parts, sizes, view = _pieces(shape[dim], pieces)
    names = singles(letters(len(shape)))
    return rule(
        [_with(names, dim, full)],
        [_with(names, dim, part) for part in parts],
        whole=("t", *letters(len(pieces), "p")),
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
    full, parts, sizes, _ = _pieces(call.out[dim], [shape[dim] for shape in call.shapes])
    return rule(
        [_with(names, dim, part) for part in parts],
        [_with(names, dim, full)],
        whole=("t", *letters(len(parts), "p")),
        partial=linear(call, [Ref(k) for k in range(len(parts))]),
        sizes=sizes,
    )


def stack(call: Call) -> Rule:
    """aten.stack(tensors, dim): the new dim is whole."""
    dim = dim_of(call.integer(1, "dim"), len(call.out))
    names = singles(letters(len(call.out)))
    rest = names[:dim] + names[dim + 1 :]
    partial = linear(call, tuple(Ref(k) for k in range(len(call.inputs))))
    return rule([rest] * len(call.inputs), [names], whole=names[dim], partial=partial)


def _pieces(dim: int, pieces: Sequence[int]) -> tuple[Dim, list[Dim], dict[str, int], bool]:
    """(dims of the whole dim, of each piece, sizes, regular?) of a dim cut into `pieces`."""
    if len(pieces) == 1:
        return ("h",), [("h",)], {}, True
    if pieces[0] and len(set(pieces)) == 1:
        return ("t", "h"), [("h",)] * len(pieces), {"t": len(pieces), "h": pieces[0]}, True
    return ("t",), [(name,) for name in letters(len(pieces), "p")], {}, False


def _with(names: Sequence[Dim], dim: int, letters_there: Dim) -> tuple[Dim, ...]:
    return (*names[:dim], letters_there, *names[dim + 1 :])


def pad(call: Call) -> Rule:
    """aten.constant_pad_nd(x, pad, value): padded dims are whole; pads come last dim first."""
    pads = call.integers(1, "pad") or ()
    rank = len(call.out)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pads) if amount}
    names = letters(rank)
    source = tuple((f"i{d}",) if d in padded else (names[d],) for d in range(rank))
    whole = [a for d in padded for a in (f"i{d}", names[d])]
    value: Arg = call.arg(2, "value", 0)
    return rule([source], [singles(names)], whole=whole, partial=linear(call, (Ref(0), value)))


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
    source = singles(names[lead:])
    return rule([source], [result], partial=linear(call, (Ref(0),)), sizes=sizes)


def new_tensor(call: Call) -> Rule:
    """Constant factories that take a tensor for its dtype: its dims are followed where the shapes
    are equal, and otherwise asked for whole."""
    shape, out = call.shapes[0], call.out
    names = letters(len(out))
    zero = ("zeros" in call.op) or ("empty" in call.op)
    fill = call.arg(2 if "new_full" in call.op else 1, "fill_value", None)
    zero = zero or ("full" in call.op and fill == 0)
    partial = linear(call, (Ref(0),)) if zero else ()
    if shape == out:
        return rule([singles(names)], [singles(names)], partial=partial)
    others = letters(len(shape), "i")
    return rule([singles(others)], [singles(names)], whole=others, partial=partial)


def rolled(call: Call) -> Rule:
    """aten.flip(x, dims), aten.roll(x, shifts, dims): these dims are whole; none named, all."""
    rank = len(call.out)
    at = 2 if "roll" in call.op else 1
    named = call.integers(at, "dims") or tuple(range(rank))
    names = letters(rank)
    whole = {names[dim_of(d, rank)] for d in named}
    dims = singles(names)
    return rule([dims], [dims], whole=whole, partial=linear(call, (Ref(0),)))


def triangle(call: Call) -> Rule:
    """aten.tril, aten.triu: the last two dims are whole."""
    names = letters(len(call.out))
    dims = singles(names)
    return rule([dims], [dims], whole=names[-2:], partial=linear(call, (Ref(0),)))


def complex_pairs(call: Call) -> Rule:
    """aten.view_as_real, aten.view_as_complex: the pair of numbers is whole."""
    names = letters(max(len(call.out), len(call.shapes[0])))
    sides = [names[: len(shape)] for shape in (call.shapes[0], call.out)]
    return rule(
        [singles(sides[0])], [singles(sides[1])], whole=names[-1:], partial=((0,),), view=True
    )
