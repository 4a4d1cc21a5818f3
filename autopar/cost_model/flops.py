"""Floating-point operations of whole (unsharded) ops.

Two per multiplication and addition. A contraction has its own count; every other op is taken to do
one operation per element that it makes, which its memory traffic hides on any device.
"""

from __future__ import annotations

from math import prod

from autopar.cost_model.attention import FLOPS as ATTENTION_FLOPS
from autopar.cost_model.attention import attention_flops
from autopar.ir import moe
from autopar.ir.graph import Graph, Node, Ref

_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "dot")
)
_GROUPED = {
    "aten._grouped_mm.default": 1,
    "transformers.grouped_mm_fallback.default": 1,
    "transformers.grouped_mm_fallback_backward.default": 2,
}
"""Products of rows with the matrix of their group, and how many."""

_RECURRENT = {"autopar.recurrent.default": 1, "autopar.recurrent_backward.default": 3}
"""Layers whose sequence is input 0 of the forward's tensors, and how often their products are
taken: backward computes them again, and each one's gradients to both of its factors."""

_CONVOLUTION = "aten.convolution.default"
_CONVOLUTION_BACKWARD = "aten.convolution_backward.default"

CONTRACTIONS = (
    _PRODUCTS
    | set(_GROUPED)
    | set(_RECURRENT)
    | {_CONVOLUTION, _CONVOLUTION_BACKWARD}
    | set(ATTENTION_FLOPS)
) | moe.OPS
"""Ops whose arithmetic may take longer than their memory traffic."""


def flops(node: Node, graph: Graph) -> float:
    """What `node` does on all devices together."""
    if node.op in _PRODUCTS:
        return 2.0 * prod(graph.atoms[f.atom].size for f in node.factors)
    if node.op in _GROUPED:
        return 2.0 * _GROUPED[node.op] * _grouped_points(node, graph)
    if node.op in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
        return _convolution(node, graph)
    if node.op in _RECURRENT:
        return 2.0 * _RECURRENT[node.op] * _recurrent_points(node, graph)
    if node.op in ATTENTION_FLOPS:
        return attention_flops(node, graph)
    if node.op in moe.OPS:
        return moe.flops(node, graph)
    return float(sum(prod(tensor.shape) for tensor in node.outputs))


def _grouped_points(node: Node, graph: Graph) -> int:
    """Every row (or column) meets the matrix of one group alone, unless both have groups."""
    left, right = (graph.type_of(ref).shape for ref in node.inputs[:2])
    return prod(left[-2:] if len(right) == 2 else left) * right[-1]


def _recurrent_points(node: Node, graph: Graph) -> int:
    """Every row of every step meets each weight matrix of its direction."""
    types = graph.input_types(node)
    steps, batch, _ = types[0 if node.op == "autopar.recurrent.default" else 3].shape
    matrices = [tensor for tensor in types if len(tensor.shape) == 2]
    return steps * batch * sum(prod(tensor.shape) for tensor in matrices)


def _convolution(node: Node, graph: Graph) -> float:
    """A product with each weight at every pixel of the side that has the strides' fewer: the result
    or, transposed, the input. Backward does it once per gradient that is wanted."""
    forward = node.op == _CONVOLUTION
    types = graph.input_types(node)
    if forward:
        x, weight, result, transposed, times = *types[:2], node.outputs[0], node.args[6], 1
    else:
        result, x, weight = types[:3]
        mask = node.args[10]
        assert isinstance(mask, tuple)
        transposed, times = node.args[7], sum(map(bool, mask[:2]))
    assert not isinstance(transposed, Ref)
    side = x if transposed else result
    return 2.0 * times * side.shape[0] * prod(side.shape[2:]) * prod(weight.shape)
