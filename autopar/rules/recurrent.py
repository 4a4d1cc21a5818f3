"""Recurrent layers (`runtime/ops/recurrent.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.graph import Graph, Node
from autopar.rules.notation import Call, Dims, Rule, letters, rule, singles
from autopar.rules.op import Family, Op

_SEQUENCE = 3
"""The number of dims of tensors that have rows, unlike weights."""


def recurrent_layer(call: Call) -> Rule:
    """autopar.recurrent and its backward: sequences [T, b, .] and states [D, b, .] of independent
    rows. A step needs all outputs of the step before. Gradients of weights are summed over b."""

    def dims(shape: Sequence[int], prefix: str) -> Dims:
        names = list(letters(len(shape), prefix))
        names[1:2] = "b" if len(shape) == _SEQUENCE else names[1:2]
        return singles(names)

    inputs = [dims(x.shape, f"i{k}_") for k, x in enumerate(call.inputs)]
    outputs = [dims(x.shape, f"o{k}_") for k, x in enumerate(call.outputs)]
    named = {a for tensor in (*inputs, *outputs) for dim in tensor for a in dim}
    return rule(inputs, outputs, whole=named - {"b"})


def _flops(node: Node, graph: Graph) -> float:
    """FLOPs: every row of every step is multiplied by each weight matrix of its direction. Backward
    recomputes these matmuls, and computes the gradients of both factors of each."""
    types = graph.input_types(node)
    sequence, times = (3, 3) if "backward" in node.op else (0, 1)
    steps, batch, _ = types[sequence].shape
    weights = sum(prod(tensor.shape) for tensor in types if len(tensor.shape) == 2)
    return 2.0 * times * (steps * batch * weights)


RECURRENT: Family = (
    (
        Op(recurrent_layer, _flops, sequential=True),
        "autopar.recurrent.default autopar.recurrent_backward.default",
    ),
)
