"""Activations that are saved in fewer bits: the step as another graph.

A float32 activation that backward reads is rounded (`ROUND`) behind its last use in forward, and
the rounded tensor is saved. In front of its first reader in backward it is cast back to float32
(`RESTORE`). Both are ops like all others: they are laid out, priced, scheduled and written as such.
Forward computes what it would without, and gradients are those at the rounded values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.ir.graph import (
    OUTPUT_ROLES,
    Graph,
    Node,
    Phase,
    Ref,
    Role,
    per_graph,
    transplanted,
)
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import RESTORE, ROUND, is_optional, whole_factors
from autopar.ir.uses import groups, root_of


def is_rounded(graph: Graph, root: Ref) -> bool:
    """Whether a tensor is rounded, if it is saved: it is the first output of an op of forward with
    a `saved_dtype`, and no output of the graph, which is held anyway."""
    node = graph.nodes[root.node]
    is_marked = bool(node.saved_dtype) and node.phase is Phase.FORWARD and not root.output
    return is_marked and root not in _leaving(graph)


@per_graph
def _leaving(graph: Graph) -> frozenset[Ref]:
    return frozenset(
        root_of(graph, ref)[0] for node in graph.with_role(*OUTPUT_ROLES) for ref in node.inputs
    )


def with_rounding(graph: Graph, dtype: str) -> Graph:
    """A pass: takes a step whose ops say what may be saved in `dtype`, gives the one in which these
    tensors are rounded, where they are saved, and restored. All nodes stay."""
    roots = {
        group.root
        for group in groups(graph)
        if group.phase is Phase.BACKWARD and is_rounded(graph, group.root)
        # A tensor that only optional copies read is decided on with them.
        if not all(is_optional(graph.nodes[use.node]) for use in group.uses)
    }
    return _Rounder(graph, roots, dtype).run() if roots else graph


def _round_node(graph: Graph, root: Ref, read: Ref, index: int, dtype: str, module: str) -> Node:
    """The node that rounds `root`, which is at `read` of the new graph, as an op of `module`. A sum
    is rounded when it is complete."""
    maker, tensor = graph.nodes[root.node], graph.type_of(root)
    return Node(
        index,
        f"{maker.name}_round",
        ROUND,
        Role.OP,
        Phase.FORWARD,
        args=(read, dtype),
        inputs=(read,),
        outputs=(replace(tensor, dtype=dtype),),
        module=module,
        key=round_key(maker.key),
        factors=whole_factors(tensor),
        source_line=maker.source_line,
    )


def _restore_node(graph: Graph, root: Ref, read: Ref, index: int, module: str) -> Node:
    """The node that restores `root`, whose rounded tensor is at `read`."""
    maker, tensor = graph.nodes[root.node], graph.type_of(root)
    return replace(
        _round_node(graph, root, read, index, tensor.dtype, module),
        name=f"{maker.name}_restore",
        op=RESTORE,
        phase=Phase.BACKWARD,
        key=round_key(maker.key).replace(":forward:round.", ":backward:restore.", 1),
    )


def round_key(key: str) -> str:
    """The key of the ops that round the first output of ops with `key`.

    >>> round_key("layers.*.mlp:forward:silu.0")
    'layers.*.mlp:forward:round.silu.0'
    """
    place, _, op = key.rpartition(":")
    return f"{place}:round.{op}"


def rounded_key(key: str) -> str | None:
    """The key of the ops whose output ops with `key` round or restore; None if they do neither.

    >>> rounded_key("layers.*.mlp:backward:restore.silu.0")
    'layers.*.mlp:forward:silu.0'
    """
    place, _, rest = key.rpartition(":")
    word, _, op = rest.partition(".")
    module, _, phase = place.rpartition(":")
    if (word, phase) not in (("round", Phase.FORWARD), ("restore", Phase.BACKWARD)):
        return None
    return f"{module}:{Phase.FORWARD.value}:{op}" if "." in op else None


class _Rounder:
    def __init__(self, graph: Graph, refs: Collection[Ref], dtype: str) -> None:
        self.graph, self.refs, self.dtype = graph, refs, dtype
        self.nodes: list[Node] = []
        self.place: dict[int, int] = {}
        """The new index of each node."""
        self.rounded: dict[Ref, Ref] = {}
        self.restored: dict[Ref, Ref] = {}
        """Each restored tensor, and views of it in backward, by what it was."""
        self.behind = self._last_uses()

    def _last_uses(self) -> dict[int, list[Ref]]:
        """The tensors to round behind an op of forward: the last to read them before backward does,
        or the one that makes them."""
        places = {(g.root, g.phase): [use.node for use in g.uses] for g in groups(self.graph)}

        def last(root: Ref) -> int:
            first = min(places[root, Phase.BACKWARD])
            used = places.get((root, Phase.FORWARD), ())
            return max((place for place in used if place < first), default=root.node)

        return grouped((last(root), root) for root in sorted(self.refs))

    def run(self) -> Graph:
        for node in self.graph.nodes:
            is_backward = node.phase is Phase.BACKWARD
            refs = {
                ref: self._in_backward(ref, node.module) if is_backward else self._placed(ref)
                for ref in node.inputs
            }
            self.place[node.index] = self._put(node, refs)
            for root in self.behind.get(node.index, ()):
                at, read = Ref(len(self.nodes)), self._placed(root)
                self.nodes.append(
                    _round_node(self.graph, root, read, at.node, self.dtype, node.module)
                )
                self.rounded[root] = at
        return replace(self.graph, nodes=tuple(self.nodes))

    def _put(self, node: Node, refs: dict[Ref, Ref]) -> int:
        index = len(self.nodes)
        self.nodes.append(transplanted(node, index, refs.__getitem__))
        return index

    def _placed(self, ref: Ref) -> Ref:
        return Ref(self.place[ref.node], ref.output)

    def _in_backward(self, ref: Ref, module: str) -> Ref:
        """What backward reads as `ref`: of a rounded tensor the restored one, as an op of `module`,
        or a view of it."""
        node = self.graph.nodes[ref.node]
        root, _ = root_of(self.graph, ref)
        if root not in self.refs or node.phase is Phase.BACKWARD:
            return self._placed(ref)
        if ref not in self.restored:
            if ref == root:
                index = len(self.nodes)
                self.nodes.append(
                    _restore_node(self.graph, root, self.rounded[root], index, module)
                )
            else:
                (source,) = node.inputs
                read = {source: self._in_backward(source, module)}
                index = self._put(replace(node, phase=Phase.BACKWARD), read)
            for output in range(len(node.outputs)):
                self.restored[Ref(ref.node, output)] = Ref(index, output)
        return self.restored[ref]
