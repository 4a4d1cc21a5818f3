"""How long tensors of a step are there, whatever is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.casts import casts_of
from autopar.ir.copies import is_optional
from autopar.ir.graph import OUTPUT_ROLES, Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.uses import Group, Use, groups, root_of


@dataclass(frozen=True, slots=True)
class Life:
    """Of a tensor in one phase: the ops that read it, by place, with the first use of each; `first`
    of all, `certain` and `last` of those that are no optional copies (-1: none). What is made in
    the phase is there from `made`; else it was before."""

    group: Group
    made: int | None
    uses: Mapping[int, Use]
    first: int
    certain: int
    last: int


@per_graph
def lives(graph: Graph) -> tuple[Life, ...]:
    """That of each group. What only leaves the graph, cast or not, is read by nothing."""
    found: list[Life] = []
    cast = casts_of(graph).gradients
    for group in groups(graph):
        uses: dict[int, Use] = {}
        for use in group.uses:
            if graph.nodes[use.node].role not in OUTPUT_ROLES and use.node not in cast:
                uses.setdefault(use.node, use)
        root = graph.nodes[group.root.node]
        made = root.index if root.phase is group.phase else None
        certain = [place for place in uses if not is_optional(graph.nodes[place])]
        first = min(uses, default=-1)
        ends = min(certain, default=-1), max(certain, default=-1)
        found.append(Life(group, made, uses, first, *ends))
    return tuple(found)


@per_graph
def handed_out(graph: Graph) -> tuple[tuple[Node, int], ...]:
    """What forward returns detached, which the script holds from then on, and the last op that
    reads it, or may if it is saved and not made again; a tensor once, and none that is larger than
    what it is a view of."""
    last: dict[int, int] = {}
    made = {node.name: node.index for node in graph.nodes if node.phase is Phase.FORWARD}
    for life in lives(graph):
        root = made.get(graph.nodes[life.group.root.node].name, life.group.root.node)
        last[root] = max(last.get(root, root), *life.uses, root)
    found: dict[Ref, tuple[Node, int]] = {}
    for node in graph.with_role(Role.DETACHED):
        root, _ = root_of(graph, node.inputs[0])
        is_made = graph.nodes[root.node].role is Role.OP
        if is_made and graph.type_of(node.inputs[0]).num_bytes <= graph.type_of(root).num_bytes:
            found.setdefault(root, (node, last.get(root.node, root.node)))
    return tuple(found.values())


@per_graph
def gradients(graph: Graph) -> tuple[tuple[list[Node], Ref], ...]:
    """What ops make that becomes gradients, before casts, and of which parameters."""
    params = {node.target: node for node in graph.with_role(Role.PARAM)}
    casts = casts_of(graph).gradients
    found: dict[Ref, list[Node]] = {}
    for node in graph.with_role(Role.GRAD):
        root, _ = root_of(graph, node.inputs[0])
        while root.node in casts:
            root, _ = root_of(graph, graph.nodes[root.node].inputs[0])
        if graph.nodes[root.node].role is Role.OP:
            found.setdefault(root, []).append(params[node.target])
    return tuple((owners, root) for root, owners in found.items())
