"""Losses, whole and in chunks of rows: a rank scores the targets whose classes it has."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.choices import Choice, shardings
from autopar.ir.graph import Graph, Node, itemsize
from autopar.ir.own_ops import LINEAR, LINEAR_BACKWARD, SCORES, SCORES_BACKWARD
from autopar.ir.passes.loss_chunks import chunk_rows
from autopar.ir.redistribute import local_shape
from autopar.rules.notation import Call, Dims, Rule, letters, linear, place, rule, singles
from autopar.rules.op import (
    DimName,
    Family,
    MatmulWork,
    Op,
    Shapes,
    Work,
    reads_shape_of,
    row_itemsize,
)

_NONE, _MEAN = 0, 1


def _loss_dims(shape: Sequence[int]) -> tuple[Dims, Dims]:
    """Dims of scores and of targets; the class dim, the second or only one, is `c`."""
    names = letters(len(shape) - 1)
    return singles((*names[:1], "c", *names[1:])), singles(names)


def nll_loss(call: Call) -> Rule | None:
    """aten.nll_loss_forward(scores, target, weight, reduction, ignore_index) -> (loss, count). The
    mean is no sum over ranks: each has its own count."""
    reduce = call.integer(3, "reduction", _MEAN)
    if reduce == _MEAN:
        return None
    scores, target = _loss_dims(call.shapes[0])
    inputs = place(call, {0: scores, 1: target, 2: singles("c")})
    return rule(inputs, [target if reduce == _NONE else (), ()], positional="c")


def nll_loss_backward(call: Call) -> Rule:
    """aten.nll_loss_backward(grad, scores, target, weight, reduction, ignore_index, count): right
    for the mean too, given the count of all ranks."""
    scores, target = _loss_dims(call.out)
    grad = target if call.integer(4, "reduction", _MEAN) == _NONE else ()
    inputs = place(call, {0: grad, 1: scores, 2: target, 3: singles("c"), 6: ()})
    return rule(inputs, [scores], positional="c", partial=linear(call, (call.arg(0),)))


def _score_of_targets(shapes: Shapes) -> dict[int, int]:
    """One score for each target."""
    return {0: prod(shapes.local_inputs[1])}


LOSS: Family = (
    (
        Op(nll_loss, reads=_score_of_targets, dim_names=(DimName(0, -1, "classes"),)),
        "nll_loss_forward",
    ),
    (Op(nll_loss, reads=_score_of_targets), "nll_loss2d_forward"),
    (Op(nll_loss_backward, reads=reads_shape_of(1)), "nll_loss_backward nll_loss2d_backward"),
)

# Losses of heads in chunks of rows (`ir.passes.loss_chunks`, `runtime/ops/chunked_loss.py`).
#
# Rows are parallel. Ranks that share the classes (letter `v`) exchange the largest score, the sum
# and the target's score of each row, all rows at once. Backward recomputes the scores of its
# current chunk. Each rank makes a term of the gradient of `x`, and its shard of that of `w`.

_FORWARD_KERNELS, _BACKWARD_KERNELS = 15, 16
"""The number of kernels per chunk that are no matmuls."""


def linear_loss(call: Call) -> Rule:
    """autopar.linear_nll(x, w, target, ignored, chunks) -> (loss, rows), and its backward(x, w,
    target, rows, grad, ignored, chunks) -> gradients of x and w."""
    given = [singles("nd"), singles("vd"), singles("n")]
    if call.op == LINEAR:
        return rule(given, [(), singles("n")], whole="d", permuted="v", positional="v")
    return rule(
        [*given, singles("n"), ()],
        given[:2],
        whole="d",
        positional="v",
        partial=linear(call, (call.arg(4),)),
    )


def loss_of_scores(call: Call) -> Rule:
    """autopar.scores_nll(scores, target, ignored, chunks) -> (loss, rows), and its backward(scores,
    x, w, target, rows, grad, ignored, chunks) -> gradients of x and w."""
    scores, row = singles("nv"), singles("n")
    if call.op == SCORES:
        return rule([scores, row], [(), row], permuted="v", positional="v")
    operands = [singles("nd"), singles("vd")]
    partial = linear(call, (call.arg(5),))
    return rule([scores, *operands, row, row, ()], operands, positional="v", partial=partial)


def _sizes(
    graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]
) -> tuple[int, int, int, int]:
    """(rows of a chunk, chunks, classes, width) on a rank; the width is 0 where there is none."""
    inputs, _ = shardings(node, choice)
    types = graph.input_types(node)
    shapes = [local_shape(t, graph.atoms, s, sizes) for t, s in zip(types, inputs, strict=True)]
    if node.op in (LINEAR, LINEAR_BACKWARD):
        (rows, width), (classes, _) = shapes[:2]
    else:
        (rows, classes), width = shapes[0], shapes[1][-1] if node.op == SCORES_BACKWARD else 0
    chunks = node.args[-1]
    assert isinstance(chunks, int)
    size = chunk_rows(rows, chunks)
    return size, -(-rows // size), classes, width


def _itemsizes(graph: Graph, node: Node) -> tuple[int, int]:
    """Bytes of a score, and of what is summed over a row."""
    dtype = graph.type_of(node.inputs[0]).dtype
    return itemsize(dtype), row_itemsize(dtype)


def _flops(node: Node, graph: Graph) -> float:
    """FLOPs: 2 per score and feature for each matmul; 4 per score where there is none."""
    count = {LINEAR: 1, LINEAR_BACKWARD: 3, SCORES: 0, SCORES_BACKWARD: 2}[node.op]
    shapes = [tensor.shape for tensor in graph.input_types(node)]
    if node.op == SCORES:
        return 4.0 * prod(shapes[0])
    x, w = shapes[:2] if node.op != SCORES_BACKWARD else shapes[1:3]
    return 2.0 * count * x[0] * prod(w)


def _work(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> Work:
    """A matmul that makes the scores, two that use them, and pointwise work on a chunk's scores.
    Forward takes their maximum, subtracts it, and sums the exponentials. Backward subtracts the
    row's value, takes the exponential, and multiplies it by the gradient, in the scores' dtype."""
    rows, chunks, classes, width = _sizes(graph, node, choice, sizes)
    item, row = _itemsizes(graph, node)
    scores, weight, of_rows = rows * classes, classes * width, rows * width
    moved = item * (scores + weight + of_rows)
    is_backward = node.op in (LINEAR_BACKWARD, SCORES_BACKWARD)
    per_score = 2 * item + 4 * row if item < row else 6 * row
    shapes = [(scores, width)] if node.op in (LINEAR, LINEAR_BACKWARD) else []
    merged = per_score * scores
    if is_backward:
        shapes += [(of_rows, classes), (weight, rows)]
        merged += 2 * row * weight if item < row else 0
    matmuls = tuple(MatmulWork(chunks, out, depth, moved) for out, depth in shapes)
    flops = 2.0 * sum(p.count * p.out * p.depth for p in matmuls)
    kernels = _BACKWARD_KERNELS if is_backward else _FORWARD_KERNELS
    return Work(flops, 1, chunks, kernels, merged, matmuls=matmuls)


def _inner_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes of a chunk's scores, and of a copy of them if sums have another dtype. Then the sum of
    the gradients of w has that dtype too, and exists before the one that is returned."""
    rows, _, classes, width = _sizes(graph, node, choice, sizes)
    item, row = _itemsizes(graph, node)
    scores, weight = rows * classes, classes * width
    if item == row or node.op == SCORES:
        return row * scores
    held = (item + row) * scores
    if node.op == LINEAR:
        return held
    return max(row * weight, (row - item) * weight + max(held, item * (scores + weight)))


_CLASSES = (DimName(0, -1, "classes"),)

CHUNKED_LOSS: Family = (
    (
        Op(
            linear_loss,
            _flops,
            work=_work,
            inner_bytes=_inner_bytes,
            row_reductions=("max", "sum", "sum"),
            rows_of=2,
        ),
        LINEAR,
    ),
    (
        Op(
            loss_of_scores,
            _flops,
            work=_work,
            inner_bytes=_inner_bytes,
            row_reductions=("max", "sum", "sum"),
            dim_names=_CLASSES,
        ),
        SCORES,
    ),
    (
        Op(linear_loss, _flops, work=_work, inner_bytes=_inner_bytes),
        LINEAR_BACKWARD,
    ),
    (
        Op(
            loss_of_scores,
            _flops,
            work=_work,
            inner_bytes=_inner_bytes,
            dim_names=_CLASSES,
        ),
        SCORES_BACKWARD,
    ),
)
