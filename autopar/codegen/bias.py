"""The pass that adds a bias within the matmul again, where no collective has come between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.graph import Node, TensorType
from autopar.rules.op import Shapes

aten = torch.ops.aten

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
        if product.target is aten.mm.default and len(product.users) == 1:
            node.target, node.args = aten.addmm.default, (bias, *product.args)
            graph.erase_node(product)
    return graph
