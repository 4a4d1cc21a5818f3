"""The lifetimes of tensors: within a microbatch, and while a device computes others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autopar.ir.casts import casts_of
from autopar.ir.choices import Saved
from autopar.ir.graph import OUTPUT_ROLES, Graph, Node, Phase, Ref, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import is_optional, original_key
from autopar.ir.problem import IntArray, Label
from autopar.ir.uses import SAVED, Group, Use, groups, is_saved, root_key, root_of
from autopar.plans.requests.request import PlanRequest


@dataclass(frozen=True, slots=True)
class Life:
    """The lifetime of a tensor in one phase. `uses` has the first use of each op that reads it, by
    the op's index. `first` is the first of these ops; `certain` and `last` are the first and the
    last that are no optional copies (-1: none). A tensor made in the phase lives from op `start`;
    others are made before (None)."""

    group: Group
    start: int | None
    uses: Mapping[int, Use]
    first: int
    certain: int
    last: int


@per_graph
def lives(graph: Graph) -> tuple[Life, ...]:
    """The lifetime of each group. Outputs of the graph, cast or not, are no reads."""
    all_lives: list[Life] = []
    cast = casts_of(graph).gradients
    for group in groups(graph):
        uses = {
            use.node: use
            for use in reversed(group.uses)
            if graph.nodes[use.node].role not in OUTPUT_ROLES and use.node not in cast
        }
        root = graph.nodes[group.root.node]
        start = root.index if root.phase is group.phase else None
        certain = [place for place in uses if not is_optional(graph.nodes[place])]
        first = min(uses, default=-1)
        ends = min(certain, default=-1), max(certain, default=-1)
        all_lives.append(Life(group, start, uses, first, *ends))
    return tuple(all_lives)


@per_graph
def results_in_order(graph: Graph) -> tuple[tuple[Node, int], ...]:
    """Detached outputs of forward, which the script holds from then on, each with the last op that
    reads it, or may if it is saved and not recomputed. Every root is listed once. Outputs larger
    than their root are left out."""
    last: dict[int, int] = {}
    by_name = {node.name: node.index for node in graph.nodes if node.phase is Phase.FORWARD}
    for life in lives(graph):
        root = by_name.get(graph.nodes[life.group.root.node].name, life.group.root.node)
        last[root] = max(last.get(root, root), *life.uses, root)
    results: dict[Ref, tuple[Node, int]] = {}
    for node in graph.with_role(Role.DETACHED):
        root, _ = root_of(graph, node.inputs[0])
        is_computed = graph.nodes[root.node].role is Role.OP
        if is_computed and graph.type_of(node.inputs[0]).num_bytes <= graph.type_of(root).num_bytes:
            results.setdefault(root, (node, last.get(root.node, root.node)))
    return tuple(results.values())


@per_graph
def gradients(graph: Graph) -> tuple[tuple[list[Node], Ref], ...]:
    """The tensors that become gradients, before casts, each after its parameters."""
    params = {node.target: node for node in graph.with_role(Role.PARAM)}
    casts = casts_of(graph).gradients
    by_root: dict[Ref, list[Node]] = {}
    for node in graph.with_role(Role.GRAD):
        root, _ = root_of(graph, node.inputs[0])
        while root.node in casts:
            root, _ = root_of(graph, graph.nodes[root.node].inputs[0])
        if graph.nodes[root.node].role is Role.OP:
            by_root.setdefault(root, []).append(params[node.target])
    return tuple((owners, root) for root, owners in by_root.items())


# Memory of other microbatches while a device computes one, as far as decisions determine it: what
# they have saved for backward, or for the second part of it.
#
# A problem counts no more of them than are in flight at a time, so that no plan that fits is
# missed. Where different numbers may wait for each part, the largest sum counts.


class InFlight:
    """The microbatches of `request`: `others` are in flight while one is computed."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.sizes = request.step, request.mesh.sizes
        self.others = max(request.waiting, key=lambda each: (sum(each), each))

    def times(self, key: str) -> int:
        """The number of microbatches, with the one being computed, of which a device holds what the
        decision `key` saves."""
        rest = self.others.weights if key in _read_by_second_part(self.graph) else 0
        return 1 + self.others.backward + rest

    def recomputed(self, key: str, labels: Sequence[Label]) -> IntArray:
        """Bytes per choice of an op that the first part of backward may recompute: those of its
        tensors that wait for the second part. Each counts as a shard, cut on every axis."""
        refs = _read_by_both(self.graph).get(key, ())
        shard_bytes = sum(self.graph.type_of(ref).num_bytes // prod(self.sizes) for ref in refs)
        is_recomputed = [not isinstance(label, Saved) for label in labels]
        return np.array(is_recomputed, np.int64) * (self.others.weights * shard_bytes)

    def amounts(self, key: str, labels: Sequence[Label], of_all: IntArray) -> IntArray:
        """Bytes per choice that other microbatches hold, of the bytes `of_all` microbatches."""
        times, recomputed = self.times(key), self.recomputed(key, labels)
        return (of_all - recomputed) // times * (times - 1) + recomputed


def _keys(graph: Graph, root: Ref) -> tuple[str, str]:
    """The keys of what decides how a tensor is saved, or recomputed: of its maker, and of the
    decision on saving it."""
    maker = graph.nodes[root.node]
    saved = original_key(maker.key) if is_optional(maker) else root_key(graph, root)
    return maker.key, SAVED + saved


@per_graph
def _read_by_second_part(graph: Graph) -> frozenset[str]:
    """The keys of decisions on saving tensors, or possibly so, all of which the second part of
    backward reads."""
    by_key: dict[str, bool] = {}
    for group in groups(graph):
        if is_saved(graph, group) or is_optional(graph.nodes[group.root.node]):
            for key in _keys(graph, group.root):
                by_key[key] = by_key.get(key, True) and _is_read_by_second(graph, group)
    return frozenset(key for key, is_read in by_key.items() if is_read)


@per_graph
def _read_by_both(graph: Graph) -> Mapping[str, Sequence[Ref]]:
    """Per class of optional copies in the first part of backward, their outputs that the second
    part reads."""
    return grouped(
        (key, group.root)
        for group in groups(graph)
        if is_optional(graph.nodes[group.root.node])
        and not _is_second(graph, group.root.node)
        and _is_read_by_second(graph, group)
        for key in _keys(graph, group.root)
    )


def _is_read_by_second(graph: Graph, group: Group) -> bool:
    return any(_is_second(graph, use.node) for use in group.uses)


def _is_second(graph: Graph, index: int) -> bool:
    return graph.second_part is not None and index >= graph.second_part
