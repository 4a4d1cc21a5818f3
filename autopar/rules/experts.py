"""A layer of experts, `autopar::experts` and its backward (`runtime/ops/experts.py`).

It can shard its tokens, its experts, the width of its experts; and tokens and experts at once on
one axis. How many tokens an expert gets depends on the data. All figures here are for uniform
routing, with N * K / E of the rows for each expert: what balanced routers tend to, and the expected
value of a random router.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.choices import Choice, joint_axes, num_shards, shardings
from autopar.ir.graph import Graph, Node, itemsize
from autopar.ir.redistribute import local_shape
from autopar.rules.notation import Call, Dims, Rule, place, rule, singles
from autopar.rules.op import Exchange, Family, Joint, JointCall, Op

FORWARD, BACKWARD = "autopar.experts.default", "autopar.experts_backward.default"
EXCHANGE = "exchange"

_WHOLE = ("d", "k", "g")
_JOINT = ((EXCHANGE, ("n", "e")),)
_TOKENS, _CHOICES = singles("nd"), singles("nk")
_WEIGHTS: tuple[Dims, ...] = (singles("egid"), singles("edi"), singles("egi"))
"""The dims of up, down and up_bias."""

_COUNT_BYTES = 4


def experts_layer(call: Call) -> Rule:
    """autopar.experts(x, chosen, weights, up, down, up_bias, gate, may_skip) -> y, and
    autopar.experts_backward(grad, x, ...) -> gradients of x, weights, up, down and up_bias, which
    is empty where there is none. A rank that has some of the experts, or a part of each, makes a
    summand of y."""
    inputs = (_TOKENS, _CHOICES, _CHOICES, *_WEIGHTS)
    outputs: tuple[Dims, ...] = (_TOKENS,)
    if call.op == BACKWARD:
        bias = _WEIGHTS[2] if len(call.outputs[4].shape) == 3 else singles("z")
        inputs, outputs = (_TOKENS, *inputs), (_TOKENS, _CHOICES, *_WEIGHTS[:2], bias)
    return rule(
        place(call, dict(enumerate(inputs))),
        outputs,
        whole=_WHOLE,
        positional=("e",),
        joint=_JOINT,
    )


def first_input(node: Node) -> int:
    """The first of x, chosen, weights and up among the inputs."""
    return 0 if node.op == FORWARD else 1


def _flops(node: Node, graph: Graph) -> float:
    """FLOPs: forward 2 per weight and row. Backward twice that for the gradients of rows and
    weights, and the matmul with `up` once more."""
    x, chosen, _, up = (graph.type_of(r).shape for r in node.inputs[first_input(node) :][:4])
    per_row = 2.0 * x[1] * prod(up[1:3])
    forward = prod(chosen) * per_row * (up[1] + 1) / up[1]
    return forward if node.op == FORWARD else 2 * forward + prod(chosen) * per_row


def _inner_bytes(graph: Graph, node: Node, choice: Choice, sizes: Sequence[int]) -> int:
    """Bytes on one rank of the op's intermediate tensors: the rows of slots, and the experts'
    hidden rows."""
    at, times = first_input(node), 1 if node.op == FORWARD else 2
    inputs, _ = shardings(node, choice)
    x, chosen, _, up = (graph.type_of(r) for r in node.inputs[at : at + 4])
    _, gates, inner, width = local_shape(up, graph.atoms, inputs[at + 3], sizes)
    rows = prod(chosen.shape) * (up.shape[2] // inner) // num_shards(node, choice, sizes)
    values = rows * ((1 + times) * width + times * (gates + 1) * inner)
    if joint_axes(node, choice):
        # Rows as they are sent, and as they come back.
        values += rows * 2 * times * width
    return values * itemsize(x.dtype)


def _messages(call: JointCall) -> tuple[Exchange, ...]:
    """Three messages: the number of rows for each expert, the rows to the experts, and the results
    back. All of `call.size` ranks have equally many experts."""
    at = first_input(call.node)
    x, chosen, weights, up = call.inputs[at : at + 4]
    rows, of_row = prod(chosen.shape), x.shape[1] * itemsize(x.dtype)
    there = back = of_row
    if call.node.op == BACKWARD:
        of_weight, grad = itemsize(weights.dtype), x.shape[1] * itemsize(call.inputs[0].dtype)
        there, back = grad + of_row + of_weight, of_row + of_weight
    sent = _COUNT_BYTES * up.shape[0] * call.size, rows * there, rows * back
    return tuple(Exchange("all_to_all", call.axis, n, n) for n in sent)


EXPERTS: Family = (
    (
        Op(experts_layer, _flops, inner_bytes=_inner_bytes, joint={EXCHANGE: Joint(_messages)}),
        f"{FORWARD} {BACKWARD}",
    ),
)
