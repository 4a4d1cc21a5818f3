"""Which results the gradient of a parameter comes from."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph, Role

_NONE: frozenset[str] = frozenset()


def results_of_gradients(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Of each parameter whose gradient does not come from all of the results that have one, the
    results that it does come from, by their position: in eager it has none where a backward goes
    through none of these."""
    tangents = frozenset(node.target for node in graph.with_role(Role.TANGENT))
    if len(tangents) < 2:
        return {}
    reached: list[frozenset[str]] = []
    for node in graph.nodes:
        own = frozenset((node.target,)) if node.role is Role.TANGENT else _NONE
        reached.append(own.union(*(reached[ref.node] for ref in node.inputs)))
    found = {node.target: reached[node.index] for node in graph.with_role(Role.GRAD)}
    return {name: results for name, results in found.items() if results != tangents}
