"""The graph of a whole model from that of its short one (`runs`), both as FX and as `Graph`: copies
of the first period stand between the first and the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from autopar.ir.graph import Factor, Graph, Node, Ref, TensorType, given_refs
from autopar.runtime.program.lean import give
from autopar.tracer import torch_private
from autopar.tracer.atoms import atom_names
from autopar.tracer.capture import PREFIX
from autopar.tracer.classes import with_keys
from autopar.tracer.fx_graphs import MODULE_KEY, outputs_of, set_outputs
from autopar.tracer.periods import BlockPlace, Different, Periods
from autopar.tracer.runs import BlockRun


def expand_blocks(gm: fx.GraphModule, graph: Graph, run: BlockRun) -> Graph:
    """`graph` with the blocks of `run` that the short model lacks; `gm`, its twin, gets them too.
    Different, with both as they were, if the two periods are not alike."""
    periods = Periods(graph, run)
    atoms = _Atoms(graph, periods)
    order = list(periods.order(len(graph.nodes)))
    copies = _expand_fx(gm, graph, periods, order)
    index = {place: i for i, place in enumerate(order)}
    nodes = [
        _node(graph.nodes[i], copy, periods, index, atoms, copies.get((i, copy)))
        for i, copy in order
    ]
    whole = atoms.renumbered(Graph(graph.name, tuple(nodes), graph.atoms))
    pairs = periods.last_of.items()
    return (
        whole
        if all(graph.nodes[a].key == graph.nodes[b].key for a, b in pairs)
        else with_keys(whole)
    )


def _node(
    node: Node,
    copy: int,
    periods: Periods,
    index: Mapping[BlockPlace, int],
    atoms: _Atoms,
    twin: fx.Node | None,
) -> Node:
    """A copy of `node` in the whole graph."""
    refs = tuple(
        Ref(index[place], ref.output)
        for place, ref in zip(periods.reads(node, copy), node.inputs, strict=True)
    )
    given = iter(refs)
    args, kwargs = given_refs(node, lambda _: next(given))
    target = periods.rename(node.target, copy)
    return replace(
        node,
        index=index[node.index, copy],
        name=twin.name if twin is not None else f"{node.role.value}_{target}",
        args=args,
        kwargs=kwargs,
        inputs=refs,
        outputs=atoms.types(node.outputs, copy),
        module=periods.rename(node.module, copy),
        target=target,
        factors=atoms.factors(node.factors, copy),
    )


class _Atoms:
    """The atoms of a whole graph. Some atoms are of one period alone: the first and the last period
    have different ones in the same place, and no other node has these. Each copy of a period gets
    new ones. All other atoms are the same for all periods."""

    def __init__(self, graph: Graph, periods: Periods) -> None:
        self._atoms = list(graph.atoms)
        self._own: dict[int, int] = {}
        self._copies: dict[BlockPlace, int] = {}
        shared: set[int] = set()
        for a, b in periods.last_of.items():
            for x, y in zip(_atoms_of(graph.nodes[a]), _atoms_of(graph.nodes[b]), strict=True):
                if x == y:
                    shared.add(x)
                elif self._own.setdefault(x, y) != y:
                    raise Different(f"atoms {x} and {y}")
        if self._own:
            self._check_own(graph, periods, shared)

    def _check_own(self, graph: Graph, periods: Periods, shared: set[int]) -> None:
        firsts, lasts = self._own.keys(), set(self._own.values())
        if len(lasts) < len(firsts) or firsts & lasts or shared & (firsts | lasts):
            raise Different("atoms of the periods are mixed")
        for node in graph.nodes:
            held = set(_atoms_of(node))
            if node.index not in periods.last_of and held & firsts:
                raise Different("a node outside of the first period has atoms of it")
            if node.index not in periods.first_of and held & lasts:
                raise Different("a node outside of the last period has atoms of it")

    def _copy(self, atom: int, copy: int) -> int:
        if not copy or atom not in self._own:
            return atom
        if (atom, copy) not in self._copies:
            self._copies[atom, copy] = len(self._atoms)
            self._atoms.append(self._atoms[atom])
        return self._copies[atom, copy]

    def types(self, tensors: tuple[TensorType, ...], copy: int) -> tuple[TensorType, ...]:
        """The types of a copy's tensors."""
        if not copy or not self._own:
            return tensors
        return tuple(
            replace(t, parts=tuple(tuple(self._copy(a, copy) for a in dim) for dim in t.parts))
            for t in tensors
        )

    def factors(self, factors: tuple[Factor, ...], copy: int) -> tuple[Factor, ...]:
        """The factors of a copy."""
        if not copy or not self._own:
            return factors
        return tuple(replace(f, atom=self._copy(f.atom, copy)) for f in factors)

    def renumbered(self, graph: Graph) -> Graph:
        """`graph` with its atoms in order of appearance, and named."""
        if not self._own:
            return graph
        new: dict[int, int] = {}
        for node in graph.nodes:
            for tensor in node.outputs:
                for _, atom in tensor.slots():
                    new.setdefault(atom, len(new))
        nodes = tuple(
            replace(
                node,
                outputs=tuple(
                    replace(t, parts=tuple(tuple(new[a] for a in dim) for dim in t.parts))
                    for t in node.outputs
                ),
                factors=tuple(replace(f, atom=new[f.atom]) for f in node.factors),
            )
            for node in graph.nodes
        )
        names = atom_names(nodes, len(new))
        atoms = tuple(replace(self._atoms[old], name=names[i]) for old, i in new.items())
        return Graph(graph.name, nodes, atoms)


def _atoms_of(node: Node) -> list[int]:
    """The atoms of a node's tensors and factors, in order."""
    tensors = [atom for tensor in node.outputs for _, atom in tensor.slots()]
    return [*tensors, *(factor.atom for factor in node.factors)]


def _expand_fx(
    gm: fx.GraphModule, graph: Graph, periods: Periods, order: Sequence[BlockPlace]
) -> dict[BlockPlace, fx.Node]:
    """Put the copies into `gm`. Returns all its nodes, by place."""
    twins = [node for node in gm.graph.nodes if node.op != "output"]
    names = _Names(periods)
    before = {i: section.between for section in periods.sections for i in section.first}
    nodes: dict[BlockPlace, fx.Node] = {(i, 0): twin for i, twin in enumerate(twins)}
    returned: list[tuple[fx.Node, Any]] = []
    items, descs = outputs_of(gm)
    for i, copy in order:
        if i < len(twins) and copy:
            reads = [nodes[place] for place in periods.reads(graph.nodes[i], copy)]
            with gm.graph.inserting_before(twins[before[i]]):
                nodes[i, copy] = names.copied(twins[i], copy, reads)
        elif i >= len(twins):
            (source,) = periods.reads(graph.nodes[i], copy)
            returned.append((nodes[source], names.of(descs[i - len(twins)], copy)))
    for i, twin in enumerate(twins):
        if i in periods.last_of or i in periods.first_of:
            reads = [nodes[place] for place in periods.reads(graph.nodes[i], 0)]
            if reads != [twins[ref.node] for ref in graph.nodes[i].inputs]:
                twin.args, twin.kwargs = _with_sources(twin, reads)
        names.rename(twin, 0)
    assert len(items) == len(graph.nodes) - len(twins)
    set_outputs(gm, returned)
    gm.graph.lint()
    gm.recompile()
    return nodes


def _with_sources(node: fx.Node, sources: Sequence[fx.Node]) -> tuple[Any, Any]:
    """The arguments of `node` with `sources`, in order, in the place of the nodes that it reads."""
    given = iter(sources)
    return map_arg((node.args, node.kwargs), lambda _: next(given))


class _Names:
    """Copies of FX nodes, under the names of their blocks."""

    def __init__(self, periods: Periods) -> None:
        self._periods = periods
        self._labels: dict[tuple[str, int], dict[str, Any]] = {}

    def copied(self, node: fx.Node, copy: int, sources: Sequence[fx.Node]) -> fx.Node:
        """A copy of `node` that reads `sources`, where nodes are being inserted."""
        clone = node.graph.create_node(node.op, node.target, name=f"{node.name}_{copy}")
        if clone.op == "placeholder":
            clone.target = clone.name
        else:
            give(clone, *_with_sources(node, sources))
        clone.meta = dict(node.meta)
        self.rename(clone, copy)
        return clone

    def rename(self, node: fx.Node, copy: int) -> None:
        """Write the names of copy `copy` into the metadata of `node`."""
        if "target" in node.meta:
            node.meta["target"] = self._periods.rename(node.meta["target"], copy)
        if "desc" in node.meta:
            node.meta["desc"] = self.of(node.meta["desc"], copy)
        label = node.meta.get("custom", {}).get(MODULE_KEY)
        if label is not None:
            if (label, copy) not in self._labels:
                renamed = self._periods.rename(label, copy)
                self._labels[label, copy] = {**node.meta["custom"], MODULE_KEY: renamed}
            node.meta["custom"] = self._labels[label, copy]

    def of(self, desc: Any, copy: int) -> Any:
        """The descriptor of a copy's input or output."""
        return torch_private.renamed(
            desc, lambda name: PREFIX + self._periods.rename(name.removeprefix(PREFIX), copy)
        )
