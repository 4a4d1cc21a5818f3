"""Chains of a graph folded into one node each, so that no cycle comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx


def fold(
    nodes: Sequence[tuple[str, str | None]], wires: Sequence[tuple[str, str, bool]]
) -> list[list[str]]:
    """Groups of nodes, in the order of `nodes` (which is a topological one).

    `nodes` are (name, kind): joined are two of one kind (None: of none) that a wire (from, to,
    whether it may vanish) leads between, if no other way leads from the one to the other.
    """
    kind, place = dict(nodes), {name: k for k, (name, _) in enumerate(nodes)}
    home = {name: name for name in place}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(place)
    _connect(graph, ((start, end, not vanishes) for start, end, vanishes in wires))
    changed = True
    while changed:
        changed = False
        for start, end, _ in wires:
            a, b = home[start], home[end]
            if a == b or kind[a] is None or kind[a] != kind[b] or graph.edges[a, b]["stays"]:
                continue
            if any(other != b and nx.has_path(graph, other, b) for other in graph.succ[a]):
                continue
            around: list[tuple[str, str, bool]]
            around = [*graph.in_edges(b, data="stays"), *graph.out_edges(b, data="stays")]
            graph.remove_node(b)
            home.update((name, a) for name in place if home[name] == b)
            moved = ((a if x == b else x, a if y == b else y, stays) for x, y, stays in around)
            _connect(graph, ((x, y, stays) for x, y, stays in moved if x != y))
            changed = True
    groups: dict[str, list[str]] = {}
    for name in place:
        groups.setdefault(home[name], []).append(name)
    return list(groups.values())


def _connect(graph: nx.DiGraph[str], wires: Iterable[tuple[str, str, bool]]) -> None:
    """Add wires; of several between two nodes, one that stays keeps them apart."""
    for start, end, stays in wires:
        known = graph.get_edge_data(start, end, {"stays": False})
        graph.add_edge(start, end, stays=stays or known["stays"])
