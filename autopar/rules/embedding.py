"""Lookups of rows in a table of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

from autopar.ir.graph import Ref
from autopar.rules.notation import Call, Dims, Rule, letters, linear, place, rule, singles
from autopar.rules.op import DimName, Family, Op, Shapes, reads_output_size

_TABLE = DimName(0, 0, "vocab"), DimName(0, 1, "hidden")


def embedding(call: Call) -> Rule:
    """aten.embedding(weight, indices, ...): `v# h, b s -> b s h`. A rank looks up the
    rows it has."""
    index = singles(letters(len(call.shape(call.arg(1)))))
    return rule(
        place(call, {0: singles("vh"), 1: index}),
        [(*index, ("h",))],
        positional="v",
        partial=linear(call, (call.arg(0),)),
    )


def embedding_backward(call: Call) -> Rule:
    """aten.embedding_dense_backward(grad, indices, num_weights, padding, scale_by_frequency)."""
    names = letters(len(call.shape(call.arg(1))))
    index = singles(names)
    return rule(
        place(call, {0: (*index, ("h",)), 1: index}),
        [singles("vh")],
        whole=names if call.arg(4, "scale_grad_by_freq", False) else (),
        positional="v",
        partial=linear(call, (call.arg(0),)),
    )


def embedding_bag(call: Call) -> Rule:
    """aten._embedding_bag(weight, indices, offsets, ...): `v! h@, i! -> b! h@`. Which bag an index
    is in is data. Every rank finds the same bags for its columns."""
    weight = call.arg(0)
    dims = [singles(letters(len(i.shape), f"i{k}_")) for k, i in enumerate(call.inputs)]
    outputs = [singles(letters(len(o.shape), f"o{k}_")) for k, o in enumerate(call.outputs)]
    dims[cast(Ref, weight).node], outputs[0] = singles("vh"), (*outputs[0][:-1], ("h",))
    if len(call.outputs[-1].shape) == len(call.out):
        outputs[-1] = (*outputs[-1][:-1], ("h",))
    return rule(dims, outputs, whole=_without_columns(dims, outputs), permuted="h")


def embedding_bag_backward(call: Call) -> Rule:
    """aten._embedding_bag_backward(grad, indices, offsets, offset2bag, bag_size, maximum_indices,
    ...): `b! h, i! -> v! h`."""
    dims = [singles(letters(len(i.shape), f"i{k}_")) for k, i in enumerate(call.inputs)]
    for arg in (call.arg(0), call.arg(5)):
        if len(call.shape(arg)) == len(call.out):
            dims[cast(Ref, arg).node] = (*dims[cast(Ref, arg).node][:-1], ("h",))
    outputs = [singles("vh")]
    return rule(dims, outputs, whole=_without_columns(dims, outputs))


def _without_columns(*sides: Sequence[Dims]) -> set[str]:
    return {a for side in sides for dims in side for dim in dims for a in dim} - {"h"}


def _rows_of_bags(shapes: Shapes) -> dict[int, int]:
    """A row for each index."""
    (_, width), indices = shapes.local_inputs[:2]
    return {0: prod(indices) * width}


EMBEDDING: Family = (
    (Op(embedding, embedding_lookup=True, reads=reads_output_size, dim_names=_TABLE), "embedding"),
    (Op(embedding_backward, embedding_lookup=True), "embedding_dense_backward"),
    (Op(embedding_bag, reads=_rows_of_bags), "_embedding_bag _embedding_bag_forward_only"),
    (Op(embedding_bag_backward), "_embedding_bag_backward"),
)
