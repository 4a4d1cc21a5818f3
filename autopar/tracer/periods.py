"""The two periods of a run (`runs`) in the graph of a short model, and what follows from them.

The nodes of every period relate to those of the next as the first period's nodes to the last one's.
Of earlier periods a node reads what the last period's node reads, of later ones what the first's
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Phase, Ref, Role
from autopar.tracer.classes import without_refs
from autopar.tracer.runs import BlockRun

BlockPlace = tuple[int, int]
"""A node of the short graph, and which copy of it: 0 is the node itself."""


class Different(Exception):
    """The periods are not alike: the model is traced whole."""


@dataclass(frozen=True, slots=True)
class Section:
    """Nodes of the first and of the last period, one for one. They stand in this order in forward,
    in the opposite order in backward, with the copies between them."""

    first: range
    last: range

    @property
    def is_reversed(self) -> bool:
        return self.last.start < self.first.start

    @property
    def between(self) -> int:
        """The node before which the copies are inserted."""
        return max(self.first.start, self.last.start)


@dataclass(frozen=True, slots=True)
class _Link:
    """An input of a period: node `first` in the first period, node `last` in the last one. In copy
    k of the period it is copy k + `shift` of `node`, a node of the first period. With a `shift` of
    None, both are one node outside of the periods."""

    first: int
    last: int
    node: int = 0
    shift: int | None = None


class Periods:
    """The inputs of the copies of a period, node by node. Different if the two periods are not
    alike."""

    def __init__(self, graph: Graph, run: BlockRun) -> None:
        self.run = run
        self.sections = tuple(_sections(graph, run))
        pairs = [p for s in self.sections for p in zip(s.first, s.last, strict=True)]
        self.last_of = dict(pairs)
        self.first_of = {b: a for a, b in pairs}
        if (
            not len(pairs)
            == len(self.last_of)
            == len(self.first_of)
            == len(self.last_of.keys() - self.first_of)
        ):
            raise Different("the periods overlap")
        self._links = {a: self._links_of(graph.nodes[a], graph.nodes[b]) for a, b in pairs}

    def _links_of(self, a: Node, b: Node) -> tuple[_Link, ...]:
        if _form(a, self.run, self.run.period) != _form(b, self.run, 0):
            raise Different(f"{a.name} and {b.name}")
        return tuple(map(self._link, a.inputs, b.inputs))

    def _link(self, x: Ref, y: Ref) -> _Link:
        x_repeats = x.node in self.last_of or x.node in self.first_of
        y_repeats = y.node in self.last_of or y.node in self.first_of
        if x.output == y.output:
            if self.last_of.get(x.node) == y.node:
                return _Link(x.node, y.node, x.node, 0)
            if not x_repeats and y.node in self.last_of:
                return _Link(x.node, y.node, y.node, -1)
            if not y_repeats and x.node in self.first_of:
                return _Link(x.node, y.node, self.first_of[x.node], 1)
            if not x_repeats and x == y:
                return _Link(x.node, y.node)
        raise Different(f"they read nodes {x.node} and {y.node}")

    def order(self, length: int) -> Iterator[BlockPlace]:
        """The nodes of the whole graph, in order, where the short one has `length` nodes."""
        inserted = {section.between: section for section in self.sections}
        for index in range(length):
            section = inserted.get(index)
            if section is not None:
                copies = range(1, self.run.extra + 1)
                for copy in reversed(copies) if section.is_reversed else copies:
                    yield from ((a, copy) for a in section.first)
            yield index, 0

    def reads(self, node: Node, copy: int) -> list[BlockPlace]:
        """The inputs of a copy of `node`."""
        behind = self.run.extra + 1
        a, copy = (
            (self.first_of[node.index], behind)
            if node.index in self.first_of
            else (node.index, copy)
        )
        if a not in self._links:
            return [(ref.node, 0) for ref in node.inputs]
        places: list[BlockPlace] = []
        for link in self._links[a]:
            if link.shift is None or copy + link.shift < 0:
                places.append((link.first, 0))
            elif copy + link.shift > behind:
                places.append((link.last, 0))
            elif copy + link.shift == behind:
                places.append((self.last_of[link.node], 0))
            else:
                places.append((link.node, copy + link.shift))
        return places

    def rename(self, path: str, copy: int) -> str:
        """The path in the whole model of a copy of what is at `path` in the short one."""
        at = self.run.split(path)
        if at is None:
            return path
        number, rest = at
        further = copy if number < self.run.first.stop else self.run.extra
        return self.run.join(number + further * self.run.period, rest)


def _sections(graph: Graph, run: BlockRun) -> Iterator[Section]:
    """Where the periods are: from the first node of one to the first of the next."""
    firsts: dict[object, int] = {}
    lasts: dict[object, int] = {}
    for node in graph.nodes:
        kind = (node.role, node.phase) if node.role is Role.OP else node.role
        at = run.split(node.module if node.role is Role.OP else node.target)
        if at is None:
            continue
        if at[0] in run.first:
            firsts.setdefault(kind, node.index)
        elif at[0] - run.period in run.first:
            lasts.setdefault(kind, node.index)
    if firsts.keys() != lasts.keys():
        raise Different("one period has nodes of a sort that the other has not")
    for kind, a in firsts.items():
        b = lasts[kind]
        length = abs(b - a)
        if (a > b) != (kind == (Role.OP, Phase.BACKWARD)) or max(a, b) + length > len(graph.nodes):
            raise Different("the periods stand in another order")
        yield Section(range(a, a + length), range(b, b + length))


def _form(node: Node, run: BlockRun, further: int) -> object:
    """What a node and its counterpart have in common, with blocks counted `further`."""

    def counted(path: str) -> str:
        at = run.split(path)
        return path if at is None else run.join(at[0] + further, at[1])

    return (
        node.op,
        node.role,
        node.phase,
        without_refs((node.args, node.kwargs)),
        len(node.inputs),
        tuple((t.dtype, t.shape, tuple(map(len, t.parts))) for t in node.outputs),
        counted(node.module),
        counted(node.target),
        tuple((f.name, f.inputs, f.outputs, f.type, f.positional, f.members) for f in node.factors),
        node.partial,
        node.mean,
        node.view,
        node.has_rule,
        node.input_sharding,
    )
