"""A stage whose backward comes in two parts, as another graph.

The first part, `B` in a table of actions (`pipeline`), is what other stages wait for: all that the
gradients need that are sent to them. What the stage is sent arrives with it. The second, `W`, is
the rest: gradients of parameters, what they are added up to, and what leads to nothing else. Ops of
the second part come behind all others; within each part they keep their order. A stage that sends
no gradient has all its backward in the second part.

What backward makes again is an op like any: it is where it is needed, in the first part if both
need it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import OUTPUT_ROLES, Graph, Node, Phase, Ref, Role, transplanted
from autopar.ir.stages import RECEIVE, SEND


def waited_for(graph: Graph) -> frozenset[int]:
    """The ops of backward that belong to its first part."""
    found = set[int]()
    for node in reversed(graph.nodes):
        if _may_wait(node) and (node.op in (SEND, RECEIVE) or node.index in found):
            found.add(node.index)
            found.update(ref.node for ref in node.inputs)
    return frozenset(index for index in found if _may_wait(graph.nodes[index]))


def _may_wait(node: Node) -> bool:
    """Whether a node belongs to one of the parts: it is computed in backward, or leaves it."""
    is_one = node.role is Role.OP or node.role in OUTPUT_ROLES
    return is_one and node.phase is Phase.BACKWARD


def in_two_parts(graph: Graph, is_split: bool = True) -> Graph:
    """A pass: takes a stage, gives it with its backward in two parts, if it `is_split`. All nodes
    are kept, those of the second part stand last."""
    if not is_split:
        return graph
    first = waited_for(graph)

    def is_second(node: Node) -> bool:
        return _may_wait(node) and node.index not in first

    order = sorted(graph.nodes, key=is_second)
    place = {node.index: index for index, node in enumerate(order)}

    def moved(ref: Ref) -> Ref:
        return Ref(place[ref.node], ref.output)

    nodes = tuple(transplanted(node, index, moved) for index, node in enumerate(order))
    return replace(graph, nodes=nodes, second_part=sum(not is_second(n) for n in graph.nodes))
