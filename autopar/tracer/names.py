"""Names of atoms, for people: what a dim is, as far as the graph tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.graph import Node, Role
from autopar.rules.table import record_of

_INPUT_DIMS = ("batch", "seq")
_FLOAT_INPUT_DIMS = {
    2: ("batch", "features"),
    3: ("batch", "seq", "hidden"),
    4: ("batch", "channels", "height", "width"),
}


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
            tensor = node.outputs[0]
            known = _FLOAT_INPUT_DIMS if tensor.dtype.startswith(("float", "bfloat")) else {}
            yield from _single(tensor.parts, known.get(len(tensor.shape), _INPUT_DIMS))
    named = [(node, record_of(node.op)) for node in nodes]
    # Tables of embeddings first: sorting keeps the order of the rest.
    for node, record in sorted(named, key=lambda pair: not pair[1].lookup):
        for each in record.dim_names:
            ref = node.inputs[each.input]
            parts = nodes[ref.node].outputs[ref.output].parts[each.dim]
            yield from zip(parts, (each.name,) if len(parts) == 1 else each.parts, strict=False)


def _single(dims: Sequence[tuple[int, ...]], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Names for the dims that are one atom."""
    pairs = zip(dims, names, strict=False)
    return ((parts[0], name) for parts, name in pairs if len(parts) == 1)
