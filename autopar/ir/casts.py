"""Parameters and gradients in another dtype: what mixed precision casts.

Parameters of float32 that are cast for matmuls of bfloat16, by autocast or by the model, are stored
and stepped on in one dtype, and travel in another. So a cast of nothing but a parameter is a *copy*
of it: it is gathered as parameters are, and may be cast, in shards, long before an op reads it. A
tensor that is only cast to become a gradient travels as gradients do, and is cast when it has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Phase, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import ACCUMULATE
from autopar.ir.uses import Group, groups, root_of


@dataclass(frozen=True, slots=True)
class Casts:
    """`copies` has the parameter of each op that makes a copy of one, both as node indices.
    `gradients` are the ops that cast a tensor that becomes a gradient and nothing else, or add it
    up over microbatches."""

    copies: Mapping[int, int]
    gradients: frozenset[int]

    def of_parameter(self, graph: Graph, group: Group) -> bool:
        """Whether the tensor of a group is a parameter or a copy of one."""
        root = graph.nodes[group.root.node]
        return root.role is Role.PARAM or root.index in self.copies

    def of_gradient(self, graph: Graph, group: Group) -> bool:
        """Whether the tensor of a group becomes gradients, and nothing else."""
        return all(
            graph.nodes[use.node].role is Role.GRAD or use.node in self.gradients
            for use in group.uses
        )


@per_graph
def casts_of(graph: Graph) -> Casts:
    """The casts of `graph`."""
    copies: dict[int, int] = {}
    for node in graph.nodes:
        if not _is_cast(graph, node):
            continue
        root = root_of(graph, node.inputs[0])[0].node
        if graph.nodes[root].role is Role.PARAM or root in copies:
            copies[node.index] = copies.get(root, root)
    users = grouped((group.root.node, use.node) for group in groups(graph) for use in group.uses)
    gradients = set[int]()
    for node in reversed(graph.nodes):
        is_step = _is_cast(graph, node) or node.op == ACCUMULATE
        if is_step and _is_backward_output(graph, node):
            readers = users.get(node.index, ())
            if all(graph.nodes[u].role is Role.GRAD or u in gradients for u in readers):
                gradients.add(node.index)
    return Casts(copies, frozenset(gradients))


def _is_backward_output(graph: Graph, node: Node) -> bool:
    """Whether an op of backward makes the first input of a node."""
    root = graph.nodes[root_of(graph, node.inputs[0])[0].node]
    return root.role is Role.OP and root.phase is Phase.BACKWARD


def _is_cast(graph: Graph, node: Node) -> bool:
    """Whether an op changes the dtype of a tensor, and nothing else."""
    if node.role is not Role.OP or node.view or len(node.inputs) != 1 or len(node.outputs) != 1:
        return False
    before, (after,) = graph.type_of(node.inputs[0]), node.outputs
    return node.partial == ((0,),) and before.shape == after.shape and before.dtype != after.dtype
