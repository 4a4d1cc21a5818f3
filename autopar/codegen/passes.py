"""Passes over a local graph, each a function `graph -> graph` that keeps the order of collectives
and waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autopar.codegen.collectives import SENDS, WAIT
from autopar.codegen.torch_private import boxed_codegen
from autopar.ir.graph import Node, TensorType
from autopar.rules.op import Shapes

# The pass that fuses a matmul and its bias again, where no collective or wait is between them.

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
    """mm and the addition of a bias, which are separate in planning, as one addmm."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if not node.meta.get(BIAS):
            continue
        matmul, bias = node.args
        if matmul.target is not aten.mm.default or len(matmul.users) > 1:
            continue
        if not any(between.target in _MESSAGES for between in _between(matmul, node)):
            node.target, node.args = aten.addmm.default, (bias, *matmul.args)
            graph.erase_node(matmul)
    return graph


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


# The pass that drops views which undo or repeat one another: in an interpreted graph each takes as
# long as a small kernel.

_IDENTITIES = frozenset({aten.detach.default, aten.alias.default})
_SWAPS = frozenset({aten.t.default, aten.transpose.int})


def tidy_views(graph: fx.Graph) -> fx.Graph:
    """Drop ops that change nothing, reshapes of reshapes, and pairs of transpositions that cancel
    out."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        while node.target is aten.reshape.default and node.args[0].target is aten.reshape.default:
            node.args = (node.args[0].args[0], *node.args[1:])
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same, delete_user_cb=lambda user: user.op != "output")
    return drop_dead_code(graph)


def drop_dead_code(graph: fx.Graph) -> fx.Graph:
    """Drop every op whose result is not used; inputs stay. Collectives are dropped as well, since
    no rank uses their result: an op may take an argument only to know that it is there."""
    for node in reversed(graph.nodes):
        is_collective = str(node.target).startswith("_c10d_functional.")
        if not node.users and (is_collective or not node.is_impure()):
            graph.erase_node(node)
    return graph


def _same_as(node: fx.Node) -> fx.Node | None:
    """The earlier node whose value this one has, if it does nothing."""
    if node.target in _IDENTITIES:
        return node.all_input_nodes[0]
    if node.target in _SWAPS:
        (source,) = node.all_input_nodes
        if source.target is node.target and source.args[1:] == node.args[1:]:
            return source.all_input_nodes[0]
    return None


def apply_passes(graph: fx.Graph) -> fx.Graph:
    """`graph` after every pass, checked; its code takes its inputs as one list, which it clears."""
    graph = fuse_bias(tidy_views(drop_dead_code(graph)))
    graph.set_codegen(boxed_codegen())
    graph.lint()
    return graph
