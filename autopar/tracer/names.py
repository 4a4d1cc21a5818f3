"""Names of atoms, for people: what a dim is, as far as the graph tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.graph import Node, Role

_INPUT_DIMS = ("batch", "seq")
_EMBEDDING_DIMS = ("vocab", "hidden")


def atom_names(nodes: Sequence[Node], num_atoms: int) -> list[str]:
    """A name for each atom, no two the same: by the first thing that tells what it is, otherwise
    a0, a1, ... in order of appearance."""
    names: dict[int, str] = {}
    counts: dict[str, int] = {}
    for atom, name in _hints(nodes):
        if atom not in names:
            counts[name] = counts.get(name, 0) + 1
            names[atom] = name if counts[name] == 1 else f"{name}{counts[name]}"
    others = (a for a in range(num_atoms) if a not in names)
    names.update({atom: f"a{i}" for i, atom in enumerate(others)})
    return [names[a] for a in range(num_atoms)]


def _hints(nodes: Sequence[Node]) -> Iterator[tuple[int, str]]:
    """(atom, name), the most telling first."""
    for node in nodes:
        if node.role is Role.INPUT:
            for parts, name in zip(node.outputs[0].parts, _INPUT_DIMS, strict=False):
                if len(parts) == 1:
                    yield parts[0], name
    for node in nodes:
        if node.op == "aten.embedding.default":
            weight = nodes[node.inputs[0].node].outputs[node.inputs[0].output]
            yield from _whole_dims(weight.parts, _EMBEDDING_DIMS)
    for node in nodes:
        if node.op == "autopar.sdpa.default":
            heads, head_dim = (nodes[node.inputs[0].node].outputs[0].parts[d] for d in (1, 3))
            yield from zip(heads, ("heads",) if len(heads) == 1 else ("kv", "g"), strict=False)
            yield from _whole_dims((head_dim,), ("head_dim",))
    for node in nodes:
        if node.role is Role.PARAM and len(node.outputs[0].shape) == 1:
            yield from _whole_dims(node.outputs[0].parts, ("hidden",))


def _whole_dims(
    dims: Sequence[tuple[int, ...]], names: Sequence[str]
) -> Iterator[tuple[int, str]]:
    for parts, name in zip(dims, names, strict=False):
        if len(parts) == 1:
            yield parts[0], name
