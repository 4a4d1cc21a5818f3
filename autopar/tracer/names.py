"""Names of atoms, for people: what a dim is, as far as the graph tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.graph import Node, Role, TensorType

_INPUT_DIMS = ("batch", "seq")
_FLOAT_INPUT_DIMS = {
    2: ("batch", "features"),
    3: ("batch", "seq", "hidden"),
    4: ("batch", "channels", "height", "width"),
}
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
            tensor = node.outputs[0]
            known = _FLOAT_INPUT_DIMS if tensor.dtype.startswith(("float", "bfloat")) else {}
            yield from _single(tensor.parts, known.get(len(tensor.shape), _INPUT_DIMS))
    for node in nodes:
        if node.op == "aten.embedding.default":
            weight = _input(nodes, node, 0)
            yield from _single(weight.parts, _EMBEDDING_DIMS)
    for node in nodes:
        if node.op == "autopar.sdpa.default":
            query, value = _input(nodes, node, 0), _input(nodes, node, 2)
            yield from _named(query.parts[1], ("heads",), ("kv", "g"))
            yield from _named(query.parts[3], ("head_dim",), ("hd0", "hd1"))
            yield from _named(value.parts[3], ("head_dim",), ("hd0", "hd1"))
        elif node.op == "aten.nll_loss_forward.default":
            yield from _named(_input(nodes, node, 0).parts[-1], ("classes",), ())


def _input(nodes: Sequence[Node], node: Node, position: int) -> TensorType:
    ref = node.inputs[position]
    return nodes[ref.node].outputs[ref.output]


def _single(dims: Sequence[tuple[int, ...]], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Names for the dims that are one atom."""
    for parts, name in zip(dims, names, strict=False):
        if len(parts) == 1:
            yield parts[0], name


def _named(
    parts: tuple[int, ...], one: Sequence[str], several: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Names for the parts of one dim."""
    yield from zip(parts, one if len(parts) == 1 else several, strict=False)
