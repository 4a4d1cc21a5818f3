"""Ops that read or write by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from autopar.ir.graph import Arg, Ref
from autopar.rules.notation import (
    Call,
    Rule,
    aligned,
    dim_of,
    letters,
    linear,
    place,
    rule,
    singles,
)
from autopar.rules.op import Family, Op, reads_output_size


def gather(call: Call) -> Rule:
    """aten.gather(x, dim, index): `a v!, a k -> a k`."""
    shape, index = call.shape(call.arg(0)), call.shape(call.arg(2))
    dim = dim_of(call.integer(1, "dim"), len(shape))
    source, picked, whole = _matched(shape, index, dim)
    return rule(
        place(call, {0: singles(source), 2: singles(picked)}),
        [singles(picked)],
        whole=whole - {*picked[dim : dim + 1]},
        partial=linear(call, (call.arg(0),)),
    )


def scatter(call: Call) -> Rule | None:
    """aten.scatter*(x, dim, index, source or value): the scattered dim is whole."""
    shape, index = call.shape(call.arg(0)), call.shape(call.arg(2))
    source = call.arg(3, "src")
    if isinstance(source, Ref) and call.shape(source) != index:
        return None
    target, picked, whole = _matched(shape, index, dim_of(call.integer(1, "dim"), len(shape)))
    inputs = [singles(target), *[singles(picked)] * (len(call.inputs) - 1)]
    return rule(inputs, [singles(target)], whole=whole, partial=linear(call, (call.arg(0), source)))


def scatter_reduce(call: Call) -> Rule | None:
    """aten.scatter_reduce(x, dim, index, source, reduce): linear if it adds to what is there."""
    base = scatter(call)
    adds = call.arg(4, "reduce") == "sum" and call.arg(5, "include_self", True)
    return base if base is None or adds else replace(base, partial=())


def bucketize(call: Call) -> Rule:
    """aten.bucketize(x, boundaries): `a, b! -> a`."""
    names = letters(len(call.out))
    return rule(place(call, {0: singles(names), 1: singles("b")}), [singles(names)], whole="b")


def searchsorted(call: Call) -> Rule | None:
    """aten.searchsorted(boundaries, x, sorter=): `a b!, a k -> a k`, or the same boundaries for
    all."""
    bounds, sought = call.arg(0, "sorted_sequence"), call.arg(1, "self")
    if call.arg(5, "sorter") is not None or not isinstance(sought, Ref):
        return None
    names = letters(len(call.out))
    own = "b" if len(call.shape(bounds)) == 1 else (*names[:-1], "b")
    return rule(place(call, {0: singles(own), 1: singles(names)}), [singles(names)], whole="b")


def _matched(
    shape: Sequence[int], index: Sequence[int], dim: int
) -> tuple[list[str], list[str], set[str]]:
    """Letters of a tensor, of an index into its `dim`, and those that are whole: the ones of `dim`
    and of every dim that the index does not fill."""
    own, picked = list(letters(len(shape))), list(letters(len(index), "k"))
    whole: set[str] = set()
    for d, (size, count) in enumerate(zip(shape, index, strict=True)):
        if d != dim and size == count:
            picked[d] = own[d]
        else:
            whole |= {own[d], picked[d]}
    return own, picked, whole


def index_select(call: Call) -> Rule:
    """aten.index_select(x, dim, index): `a v! c, k -> a k c`."""
    rank = len(call.out)
    dim = dim_of(call.integer(1, "dim"), rank)
    source = letters(rank)
    return rule(
        place(call, {0: singles(source), 2: singles("k")}),
        [singles((*source[:dim], "k", *source[dim + 1 :]))],
        whole=source[dim : dim + 1],
        partial=linear(call, (call.arg(0),)),
    )


def index_add(call: Call) -> Rule:
    """aten.index_add(x, dim, index, source)."""
    rank = len(call.out)
    dim = dim_of(call.integer(1, "dim"), rank)
    target = letters(rank)
    source = (*target[:dim], "k", *target[dim + 1 :])
    return rule(
        place(call, {0: singles(target), 2: singles("k"), 3: singles(source)}),
        [singles(target)],
        whole=(*target[dim : dim + 1], "k"),
        partial=linear(call, (call.arg(0), call.arg(3))),
    )


def indexed(call: Call) -> Rule | None:
    """aten.index.Tensor(x, indices): indexed dims are whole, the dims of the indices parallel.
    aten.index_put(x, indices, values, accumulate): indexed dims and indices are whole."""
    target, values = call.arg(0, "self"), call.arg(2, "values")
    indices = cast("tuple[Arg, ...]", call.arg(1, "indices"))
    refs = [i for i in indices if isinstance(i, Ref)]
    if not refs or any(call.inputs[i.node].dtype in ("bool", "uint8") for i in refs):
        return None
    shape = call.shape(target)
    rank = max(len(call.shape(i)) for i in refs)
    picked = tuple(max(_at(call.shape(i), k - rank) for i in refs) for k in range(rank))
    at = [d for d, i in enumerate(indices) if isinstance(i, Ref)]
    kept = [d for d in range(len(shape)) if d not in at]
    adjacent = at == list(range(at[0], at[-1] + 1))
    lead = sum(d < at[0] for d in kept) if adjacent else 0
    own, new = letters(len(shape)), letters(rank, "k")
    result = (*(own[d] for d in kept[:lead]), *new, *(own[d] for d in kept[lead:]))
    extent = (*(shape[d] for d in kept[:lead]), *picked, *(shape[d] for d in kept[lead:]))
    inputs = [singles(own), *(aligned(call.shape(i), picked, new) for i in refs)]
    whole = {own[d] for d in at}
    if values is None:
        return rule(inputs, [singles(result)], whole=whole, partial=linear(call, (target,)))
    if isinstance(values, Ref):
        inputs.append(aligned(call.shape(values), extent, result))
    return rule(
        inputs, [singles(own)], whole={*whole, *new}, partial=linear(call, (target, values))
    )


def _at(shape: Sequence[int], index: int) -> int:
    return shape[index] if -index <= len(shape) else 1


INDEX: Family = (
    (Op(indexed, reads=reads_output_size), "index.Tensor _unsafe_index.Tensor"),
    (Op(indexed), "index_put _unsafe_index_put"),
    (Op(gather, reads=reads_output_size), "gather"),
    (Op(scatter), "scatter.src scatter.value scatter_add"),
    (Op(scatter_reduce), "scatter_reduce.two"),
    (Op(bucketize), "bucketize.Tensor"),
    (Op(searchsorted), "searchsorted.Tensor"),
    (Op(index_select, reads=reads_output_size), "index_select"),
    (Op(index_add), "index_add"),
)
