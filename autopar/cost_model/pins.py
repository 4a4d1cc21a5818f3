"""Parameters whose storage is given, and not for the planner to choose.

A pin says in what shards DTensor lays a parameter: what was `S(0)` in one graph of a model is
`C(0)` in another one where dim 0 is made of other parts, and means the same pieces. `R` alone is
whole on every rank of any mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.chunking import stored
from autopar.errors import InfeasibleError
from autopar.graph import Atom, Graph, Node, Role
from autopar.mesh import Mesh
from autopar.reshard import is_legal
from autopar.sharding import R, Sharding


def check_names(graph: Graph, pins: Mapping[str, str]) -> None:
    """InfeasibleError if a pin names no parameter of the graph."""
    unknown = sorted(set(pins) - {node.target for node in graph.with_role(Role.PARAM)})
    if unknown:
        raise InfeasibleError(
            f"the storage of {', '.join(unknown[:5])} is given, and the model has no such parameter"
        )


def pinned(
    nodes: Sequence[Node], atoms: Sequence[Atom], mesh: Mesh, pins: Mapping[str, str]
) -> Sharding | None:
    """How `nodes`, parameters that are planned as one, are to be stored; None if no pin says so.

    InfeasibleError if pins contradict each other or the shape and mesh.
    """
    found: dict[Sharding, str] = {}
    for node in nodes:
        if node.target in pins:
            found.setdefault(_storage(node, atoms, mesh, pins[node.target]), node.target)
    if len(found) > 1:
        (one, a), (other, b) = list(found.items())[:2]
        raise InfeasibleError(
            f"parameters {a} and {b} are planned as one, but are to be stored as {one} and as "
            f"{other}: give both the same storage"
        )
    return next(iter(found), None)


def _storage(node: Node, atoms: Sequence[Atom], mesh: Mesh, text: str) -> Sharding:
    if text == str(R):
        return Sharding.replicated(len(mesh.axes))
    wanted, tensor = Sharding.parse(text), node.outputs[0]
    dims = tuple(None if p.kind == "R" else p.dim for p in wanted)
    possible = (
        len(dims) == len(mesh.axes)
        and all(p.kind != "P" and p.part == 0 for p in wanted)
        and all(dim is None or dim < len(tensor.shape) for dim in dims)
    )
    found = stored(tensor, atoms, dims, mesh.sizes) if possible else None
    if found is None or not is_legal(tensor, atoms, found, mesh.sizes):
        raise InfeasibleError(
            f"parameter {node.target} of shape {list(tensor.shape)} cannot be stored as {text} on "
            f"mesh {mesh or 'of one device'}"
        )
    return found
