"""Through which states a tensor reaches the ones its uses ask for, over the arcs of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from autopar.errors import PlanMismatchError
from autopar.ir.graph import Atom, TensorType
from autopar.ir.redistribute import Collective, is_legal, step
from autopar.ir.sharding import Sharding
from autopar.plans.layout import Move

Tree = Mapping[Sharding, Sharding]
"""Each state that can be reached, and the one it is reached from; the source has no entry."""


def tree(source: Sharding, moves: Iterable[Move]) -> Tree:
    """The shortest way from `source` to every state, earlier moves preferred."""
    graph = nx.DiGraph()
    graph.add_node(source)
    graph.add_edges_from(moves)
    return dict(nx.bfs_predecessors(graph, source))


def path(parents: Tree, source: Sharding, target: Sharding) -> tuple[Move, ...]:
    """The moves from `source` to `target`; KeyError if it is not reached."""
    found: list[Move] = []
    while target != source:
        found.append(Move(parents[target], target))
        target = parents[target]
    return tuple(reversed(found))


def collective_of(
    move: Move, tensor: TensorType, atoms: Sequence[Atom], sizes: Sequence[int], name: str
) -> Collective:
    """The collective that makes `move`; PlanMismatchError, with the tensor's `name`, if it is not
    one step between two states that the tensor can be in."""
    for state in move:
        if not is_legal(tensor, atoms, state, sizes):
            raise PlanMismatchError(
                f"{name}: a tensor of shape {list(tensor.shape)} cannot be {state} on this mesh; "
                "the plan was made for another model"
            )
    found = step(tensor, atoms, *move)
    if found is None:
        raise PlanMismatchError(
            f"{name}: {move.source} -> {move.target} is not one collective; plan again"
        )
    return found
