"""What a layer of experts (`autopar::experts` and its backward) computes, holds and sends.

How many tokens an expert gets depends on the data. All figures here are for uniform routing, each
expert getting N * K / E of the rows: what balanced routers tend to, and what is expected of a
router that knows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.choices import Choice, joint_axes, num_shards, shardings
from autopar.ir.graph import Graph, Node, itemsize
from autopar.ir.redistribute import local_shape

FORWARD, BACKWARD = "autopar.experts.default", "autopar.experts_backward.default"
OPS = frozenset({FORWARD, BACKWARD})

_COUNT_BYTES = 4
Shape = tuple[int, ...]


def first_input(node: Node) -> int:
    """Where x, chosen, weights, up stand among the inputs: the first of them."""
    return 0 if node.op == FORWARD else 1


def flops(node: Node, graph: Graph) -> float:
    """Two per weight and row forward; backward twice that for the gradients of rows and weights,
    and the product with `up` once more."""
    x, chosen, _, up = (graph.type_of(r).shape for r in node.inputs[first_input(node) :][:4])
    per_row = 2.0 * x[1] * prod(up[1:3])
    forward = prod(chosen) * per_row * (up[1] + 1) / up[1]
    return forward if node.op == FORWARD else 2 * forward + prod(chosen) * per_row


def inner_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes on one rank of what the op makes on the way: the rows of slots, and what the experts
    make of them."""
    at, times = first_input(node), 1 if node.op == FORWARD else 2
    asked, _ = shardings(node, choice)
    x, chosen, _, up = (graph.type_of(r) for r in node.inputs[at : at + 4])
    _, gates, inner, width = local_shape(up, graph.atoms, asked[at + 3], sizes)
    cut = up.shape[2] // inner
    rows = prod(chosen.shape) * cut // num_shards(node, choice, sizes)
    values = rows * ((1 + times) * width + times * (gates + 1) * inner)
    if joint_axes(node, choice):
        # Rows as they are sent, and as they come back.
        values += rows * 2 * times * width
    return values * itemsize(x.dtype)


def message_bytes(node: Node, tensors: Sequence[tuple[str, Shape]], ways: int) -> tuple[int, ...]:
    """Bytes on one rank of each all-to-all of the joint factor "exchange", in order: how many rows
    go to each expert, the rows to the experts, what comes back. `tensors` are the local inputs, as
    (dtype, shape); `ways` ranks have as many experts each."""
    at = first_input(node)
    (dtype, (_, width)), (_, chosen), (weight, _), (_, up) = tensors[at : at + 4]
    rows, of_row = prod(chosen), width * itemsize(dtype)
    counts = _COUNT_BYTES * up[0] * ways
    if node.op == FORWARD:
        return counts, rows * of_row, rows * of_row
    of_weight = itemsize(weight)
    grad = width * itemsize(tensors[0][0])
    return counts, rows * (grad + of_row + of_weight), rows * (of_row + of_weight)
