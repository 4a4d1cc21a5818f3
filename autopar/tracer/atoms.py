"""Atoms: every dim of every tensor as a product of global named factors.

The rule of each op says which dims are the same letters; union-find over the graph makes equal
letters one *cell*, and splits cells where a dim is written as a product: `[B, S, H] -> [(B S), H]`
makes the merged dim the cells of B and S, `8192 -> (64, 128)` splits one cell in two, outermost
first. Cells that are not split any further are the atoms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise, product
from math import prod

from networkx.utils import UnionFind

from autopar.ir.graph import Atom, Factor, FactorType, Graph, Node, Ref, Role, Slot, TensorType
from autopar.rules.notation import Rule
from autopar.rules.table import record_of

# Names of atoms, for people: what a dim is, as far as the graph shows.

_INPUT_DIMS = ("batch", "seq")
_FLOAT_INPUT_DIMS = {
    2: ("batch", "features"),
    3: ("batch", "seq", "hidden"),
    4: ("batch", "channels", "height", "width"),
}


def atom_names(nodes: Sequence[Node], num_atoms: int) -> list[str]:
    """A name for each atom, all different: from the first hint of what it is, otherwise a0, a1, ...
    in order of appearance."""
    names: dict[int, str] = {}
    counts: dict[str, int] = {}
    for atom, name in _hints(nodes):
        if atom not in names:
            counts[name] = counts.get(name, 0) + 1
            names[atom] = name if counts[name] == 1 else f"{name}{counts[name]}"
    others = (f"a{i}" for i in count())
    return [names[a] if a in names else next(others) for a in range(num_atoms)]


def _hints(nodes: Sequence[Node]) -> Iterator[tuple[int, str]]:
    """(atom, name), the most telling first."""
    for node in nodes:
        if node.role is Role.INPUT:
            tensor = node.outputs[0]
            known = _FLOAT_INPUT_DIMS if tensor.dtype.startswith(("float", "bfloat")) else {}
            named = zip(tensor.parts, known.get(len(tensor.shape), _INPUT_DIMS), strict=False)
            yield from ((parts[0], name) for parts, name in named if len(parts) == 1)
    records = [(node, record_of(node.op)) for node in nodes]
    # Tables of embeddings first: sorting keeps the order of the rest.
    for node, record in sorted(records, key=lambda pair: not pair[1].embedding_lookup):
        for each in record.dim_names:
            ref = node.inputs[each.input]
            parts = nodes[ref.node].outputs[ref.output].parts[each.dim]
            yield from zip(parts, (each.name,) if len(parts) == 1 else each.parts, strict=False)


class Cells:
    """Union-find over sizes, in which a cell may be split into two."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._joined: UnionFind[int] = UnionFind()
        self._halves: list[tuple[int, int] | None] = []

    def make(self, size: int) -> int:
        """A new cell."""
        self.sizes.append(size)
        self._halves.append(None)
        return len(self.sizes) - 1

    def leaves(self, cells: Iterable[int]) -> list[int]:
        """The unsplit cells that `cells` consist of, outermost first, without those of size 1."""
        leaves: list[int] = []
        pending = list(cells)[::-1]
        while pending:
            cell = self._joined[pending.pop()]
            halves = self._halves[cell]
            if halves is not None:
                pending += halves[::-1]
            elif self.sizes[cell] != 1:
                leaves.append(cell)
        return leaves

    def equate(self, left: Iterable[int], right: Iterable[int]) -> bool:
        """Equate two products of cells, outermost first. False if their sizes have no common
        refinement (6 x 4 and 4 x 6); then nothing more becomes equal."""
        a, b = self.leaves(left), self.leaves(right)
        if a == b:
            return True
        if not _refinable([self.sizes[c] for c in a], [self.sizes[c] for c in b]):
            return False
        a.reverse()
        b.reverse()
        while a and b:
            x, y = a.pop(), b.pop()
            if self._halves[x] is not None or self._joined[x] != x:
                a += self.leaves([x])[::-1]
                b.append(y)
            elif self._halves[y] is not None or self._joined[y] != y:
                b += self.leaves([y])[::-1]
                a.append(x)
            elif self.sizes[x] == self.sizes[y]:
                self._joined.union(x, y)
            else:
                small, large = sorted((self.sizes[x], self.sizes[y]))
                if large % small:
                    return False
                cell = x if self.sizes[x] == large else y
                self._halves[cell] = (self.make(small), self.make(large // small))
                a.append(x)
                b.append(y)
        return not a and not b


def _refinable(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two factorizations have a common refinement: merged, their running products divide
    one another."""
    if prod(a) != prod(b):
        return False
    cuts = sorted({prod(s[: i + 1]) for s in (a, b) for i in range(len(s))})
    return all(large % small == 0 for small, large in pairwise(cuts))


class _Tensors:
    """The cells of every dim of every tensor."""

    def __init__(self, graph: Graph) -> None:
        self.cells = Cells()
        self._of = {
            Ref(node.index, k): [self.cells.make(size) for size in tensor.shape]
            for node in graph.nodes
            for k, tensor in enumerate(node.outputs)
        }

    def __getitem__(self, ref: Ref) -> list[int]:
        return self._of[ref]

    def around(self, node: Node) -> list[list[int]]:
        """Cells of the dims of each tensor input and output of a node."""
        outputs = (Ref(node.index, k) for k in range(len(node.outputs)))
        return [self._of[ref] for ref in (*node.inputs, *outputs)]


def with_atoms(
    graph: Graph, rules: Sequence[Rule | None], alike: Iterable[tuple[Ref, Ref]]
) -> Graph:
    """`graph` with atoms, parts of every dim and factors of every node. `rules[k]` is the rule of
    node k; None for nodes without one (placeholders, output items, unknown ops). `alike` pairs
    tensors of equal shape whose dims are the same: a parameter and its gradient, the same parameter
    of two layers."""
    tensors = _Tensors(graph)
    for left, right in alike:
        for a, b in zip(tensors[left], tensors[right], strict=True):
            tensors.cells.equate([a], [b])
    lettered = [
        None if rule is None else (rule, _equate(tensors, node, rule))
        for node, rule in zip(graph.nodes, rules, strict=True)
    ]
    index: dict[int, int] = {}
    types = {
        ref: _parts(tensors, ref, index)
        for node in graph.nodes
        for ref in (Ref(node.index, k) for k in range(len(node.outputs)))
    }
    nodes = tuple(
        replace(
            node,
            outputs=tuple(
                TensorType(t.dtype, t.shape, types[Ref(node.index, k)])
                for k, t in enumerate(node.outputs)
            ),
            factors=() if known is None else tuple(_factors(tensors, node, *known, index)),
        )
        for node, known in zip(graph.nodes, lettered, strict=True)
    )
    sizes = [tensors.cells.sizes[cell] for cell in index]
    in_param = {a for n in nodes if n.role is Role.PARAM for _, a in n.outputs[0].slots()}
    names = atom_names(nodes, len(sizes))
    atoms = tuple(
        Atom(size, name, i in in_param)
        for i, (size, name) in enumerate(zip(sizes, names, strict=True))
    )
    return Graph(graph.name, nodes, atoms)


def _equate(tensors: _Tensors, node: Node, rule: Rule) -> dict[str, int]:
    """Give each letter of a rule a cell, and make the dims it stands for that cell."""
    cells: dict[str, int] = {}
    sizes = dict(rule.sizes)
    for dims, groups in zip(tensors.around(node), (*rule.inputs, *rule.outputs), strict=True):
        for dim, group in zip(dims, groups, strict=True):
            for letter in group:
                if letter not in cells:
                    size = sizes[letter] if len(group) > 1 else tensors.cells.sizes[dim]
                    cells[letter] = tensors.cells.make(size)
            tensors.cells.equate([dim], [cells[letter] for letter in group])
    return cells


def _parts(tensors: _Tensors, ref: Ref, index: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """The atoms of each dim of a tensor, numbered in order of appearance."""
    return tuple(
        tuple(index.setdefault(cell, len(index)) for cell in tensors.cells.leaves([dim]))
        for dim in tensors[ref]
    )


def joint_factor(name: str, members: Sequence[Factor]) -> Factor:
    """The factor that stands where any of `members` stands. Of one member, it is that one under
    another name: what its ranks send is different."""

    def merged(columns: Iterable[tuple[Slot | None, ...]]) -> tuple[Slot | None, ...]:
        return tuple(next((s for s in c if s is not None), None) for c in columns)

    return Factor(
        name,
        members[0].atom,
        merged(zip(*(m.inputs for m in members), strict=True)),
        merged(zip(*(m.outputs for m in members), strict=True)),
        members[0].type if len(members) == 1 else FactorType.PERMUTATION,
        positional=members[0].positional and len(members) == 1,
        members=tuple(m.name for m in members),
    )


def _factors(
    tensors: _Tensors, node: Node, rule: Rule, cells: dict[str, int], index: dict[int, int]
) -> Iterator[Factor]:
    """The factors of an op, whose letters have `cells`: the atoms of each letter, and their slots.
    A letter whose dims could not be equated is whole, in each tensor by itself."""
    around = tensors.around(node)
    leaves = tensors.cells.leaves
    slots: dict[tuple[str, int], list[Slot | None]] = {}
    misfits: set[str] = set()
    loose: list[tuple[str, int, Slot, int]] = []
    for t, (dims, groups) in enumerate(zip(around, (*rule.inputs, *rule.outputs), strict=True)):
        for d, (dim, group) in enumerate(zip(dims, groups, strict=True)):
            parts = [(a, k, c) for a in group for k, c in enumerate(leaves([cells[a]]))]
            actual = leaves([dim])
            if [c for _, _, c in parts] != actual:
                misfits.update(group)
                loose += [(group[0], t, (d, p), c) for p, c in enumerate(actual)]
                continue
            for p, (letter, k, _) in enumerate(parts):
                places = slots.setdefault((letter, k), [None] * len(around))
                if places[t] is None:
                    places[t] = (d, p)
                else:
                    misfits.add(letter)
                    loose.append((letter, t, (d, p), actual[p]))
    num_inputs = len(node.inputs)
    named: dict[str, list[Factor]] = {}
    for (letter, k), places in slots.items():
        atoms = leaves([cells[letter]])
        name = letter if len(atoms) == 1 else f"{letter}.{k}"
        exchanged = letter in rule.exchanged
        # A rank's positions along a dim are a range if the outermost atom is cut.
        whole = letter in rule.whole or letter in misfits or (exchanged and k > 0)
        factor = Factor(
            name,
            index[atoms[k]],
            tuple(places[:num_inputs]),
            tuple(places[num_inputs:]),
            FactorType.NEEDS_REPLICATION if whole else rule.type_of(letter),
            positional=letter in rule.positional and not whole,
        )
        # Any atom of a parallel letter may be sharded; of other letters only the outermost.
        if letter not in misfits and (k == 0 or not (whole or exchanged)):
            named.setdefault(letter, []).append(factor)
        yield factor
    for name, letters in rule.joint:
        for k, members in enumerate(product(*(named.get(letter, ()) for letter in letters))):
            yield joint_factor(f"{name}.{k}" if k else name, members)
    for t, (letter, tensor, slot, cell) in enumerate(loose):
        places = tuple(slot if i == tensor else None for i in range(len(around)))
        yield Factor(
            f"{letter}.whole{t}",
            index[cell],
            places[:num_inputs],
            places[num_inputs:],
            FactorType.NEEDS_REPLICATION,
        )
