"""Ops that rearrange elements: views, pads, turned dims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from autopar.ir.graph import Ref
from autopar.rules.notation import Call, Dim, Rule, aligned, dim_of, letters, linear, rule, singles
from autopar.rules.op import Family, Op, output_shape


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


def permutation(call: Call) -> Rule:
    """aten.permute(x, dims)."""
    order = call.integers(1, "dims") or ()
    return permute_view([dim_of(d, len(order)) for d in order], call)


def expansion(call: Call) -> Rule:
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


def _segments(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dims on both sides with equal products; dims of size 1 left out."""
    if 0 in before:
        yield list(range(len(before))), list(range(len(after)))
        return
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    while left:
        run_left, run_right = [left.pop(0)], [right.pop(0)]
        while (a := prod(before[d] for d in run_left)) != (b := prod(after[d] for d in run_right)):
            if a < b:
                run_left.append(left.pop(0))
            else:
                run_right.append(right.pop(0))
        yield run_left, run_right


def _refine(left: Sequence[int], right: Sequence[int]) -> list[int] | None:
    """The factors, outermost first, of which both sides are products; None if there are none."""
    if 0 in left:
        return None
    marks = {prod(side[: i + 1]) for side in (left, right) for i in range(len(side))}
    steps = [*pairwise([1, *sorted(marks)])]
    return None if any(b % a for a, b in steps) else [b // a for a, b in steps]


def pad(call: Call) -> Rule:
    """aten.constant_pad_nd(x, pad, value): padded dims are whole; pads come last dim first."""
    pads = call.integers(1, "pad") or ()
    rank = len(call.out)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pads) if amount}
    names = letters(rank)
    return rule(
        [singles(f"i{d}" if d in padded else name for d, name in enumerate(names))],
        [singles(names)],
        whole=[a for d in padded for a in (f"i{d}", names[d])],
        partial=linear(call, (Ref(0), call.arg(2, "value", 0))),
    )


def rolled(call: Call) -> Rule:
    """aten.flip(x, dims), aten.roll(x, shifts, dims): these dims are whole; none named, all."""
    rank = len(call.out)
    named = call.integers(2 if "roll" in call.op else 1, "dims") or range(rank)
    dims = singles(letters(rank))
    whole = {dims[dim_of(d, rank)][0] for d in named}
    return rule([dims], [dims], whole=whole, partial=linear(call, (Ref(0),)))


def triangle(call: Call) -> Rule:
    """aten.tril, aten.triu: the last two dims are whole."""
    names = letters(len(call.out))
    dims = singles(names)
    return rule([dims], [dims], whole=names[-2:], partial=linear(call, (Ref(0),)))


def complex_pairs(call: Call) -> Rule:
    """aten.view_as_real, aten.view_as_complex: the pair of numbers is whole."""
    names = letters(max(len(call.out), len(call.shapes[0])))
    source, result = (singles(names[: len(shape)]) for shape in (call.shapes[0], call.out))
    return rule([source], [result], whole=names[-1:], partial=((0,),), view=True)


SHAPE: Family = (
    (Op(identity_view), "getitem alias detach lift_fresh"),
    (Op(transpose), "t transpose.int"),
    (Op(permutation), "permute"),
    # Local strides may differ from the traced ones, so that a view need not be possible; and a dim
    # that a rank holds one element of is not a dim of size 1.
    (
        Op(reshape, reshapes=True),
        "_unsafe_view reshape squeeze squeeze.dim squeeze.dims view",
    ),
    (Op(reshape), "unsqueeze"),
    (Op(expansion, local_args=output_shape(1, "size")), "expand"),
    (Op(complex_pairs), "view_as_complex view_as_real"),
    (Op(pad), "constant_pad_nd"),
    (Op(rolled), "flip roll"),
    (Op(triangle), "tril triu"),
)
