"""What other microbatches hold while a device works on one, as far as decisions tell: what they
have saved as they wait for backward, or for the second part of it.

A problem has no more of them than are held at a time, so that no plan that fits is missed: where
different numbers may wait for each part, those that are most together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from autopar.ir.choices import Saved
from autopar.ir.copies import is_optional, original_key
from autopar.ir.graph import Graph, Ref, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.problem import IntArray, Label
from autopar.ir.uses import SAVED, Group, groups, is_saved, root_key
from autopar.plans.request import PlanRequest


class InFlight:
    """The microbatches of `request`, of which `others` wait while one is worked on."""

    def __init__(self, request: PlanRequest) -> None:
        self.graph, self.sizes = request.step, request.mesh.sizes
        self.others = max(request.waiting, key=lambda each: (sum(each), each))

    def times(self, key: str) -> int:
        """Of how many microbatches a device holds what is handed over by the decision `key`, with
        the one that it works on."""
        rest = self.others.weights if key in _read_by_second_part(self.graph) else 0
        return 1 + self.others.backward + rest

    def made_again(self, key: str, labels: Sequence[Label]) -> IntArray:
        """Bytes, per choice of an op that backward may make again, of what waits for the second
        part of backward where the first makes it: a piece of each tensor, cut on every axis."""
        refs = _made_for_both(self.graph).get(key, ())
        pieces = sum(self.graph.type_of(ref).num_bytes // prod(self.sizes) for ref in refs)
        is_made = [not isinstance(label, Saved) for label in labels]
        return np.array(is_made, np.int64) * (self.others.weights * pieces)

    def amounts(self, key: str, labels: Sequence[Label], of_all: IntArray) -> IntArray:
        """Bytes per choice that others hold, of those that a problem counts for all."""
        times, again = self.times(key), self.made_again(key, labels)
        return (of_all - again) // times * (times - 1) + again


def _keys(graph: Graph, root: Ref) -> tuple[str, str]:
    """What decides how a tensor is handed over, or made again: by the key of its maker, and by that
    of the decision alone."""
    maker = graph.nodes[root.node]
    saved = original_key(maker.key) if is_optional(maker) else root_key(graph, root)
    return maker.key, SAVED + saved


@per_graph
def _read_by_second_part(graph: Graph) -> frozenset[str]:
    """The keys of decisions that hand over, or may, what the second part of backward reads, all of
    it."""
    found: dict[str, bool] = {}
    for group in groups(graph):
        if is_saved(graph, group) or is_optional(graph.nodes[group.root.node]):
            for key in _keys(graph, group.root):
                found[key] = found.get(key, True) and _is_read_by_second(graph, group)
    return frozenset(key for key, is_read in found.items() if is_read)


@per_graph
def _made_for_both(graph: Graph) -> Mapping[str, Sequence[Ref]]:
    """Per class of optional copies in the first part of backward, what they make that the second
    reads."""

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
