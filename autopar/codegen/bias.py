"""The pass that adds a bias within the matmul again, where nothing is sent or awaited between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autopar.codegen.collectives import SENDS, WAIT
from autopar.ir.graph import Node, TensorType
from autopar.rules.op import Shapes

aten = torch.ops.aten

_MESSAGES = SENDS | {WAIT}

BIAS = "bias"
"""Where the meta of an addition says that it adds a row to each row of a matrix."""


def adds_bias(node: Node, shapes: Shapes, inputs: Sequence[TensorType]) -> bool:
    """Whether `node` adds a row, its second input, to each row of a matrix."""
    if node.op != "aten.add.Tensor" or node.kwargs or len(inputs) != 2:
        return False
    matrix, row = shapes.local_inputs
    return len(matrix) == 2 and row == matrix[1:] and inputs[0].dtype == inputs[1].dtype


def fuse_bias(graph: fx.Graph) -> fx.Graph:
    """mm and the addition of a bias, which planning tells apart, as one addmm."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not node.meta.get(BIAS):
            continue
        product, bias = node.args
        if product.target is not aten.mm.default or len(product.users) > 1:
            continue
        if not any(between.target in _MESSAGES for between in _between(product, node)):
            node.target, node.args = aten.addmm.default, (bias, *product.args)
            graph.erase_node(product)
    return graph


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next
