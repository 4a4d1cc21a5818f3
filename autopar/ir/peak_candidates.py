"""Moments of a step: while one op is computed that is computed where the graph has it. What the
host holds is that of the whole step, `ON_HOST`, which has a limit of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import RESTORE, ROUND, STATE, is_copy


class PeakCandidate(NamedTuple):
    """While op `number` of those with `key` is computed, as they are ordered in the graph."""

    key: str
    number: int


ON_HOST = PeakCandidate("on host", 0)
"""Stands for the whole step, in which a device may have no more than its share on its host."""


def is_peak_candidate(graph: Graph, index: int) -> bool:
    """Whether an op is computed in its place, whatever is decided. A copy is made in front of the
    first op that reads it; casts of parameters and of gradients are done with what moves them. Nor
    are there states of generators, or casts of what is saved, but where decisions want them."""
    casts = casts_of(graph)
    node, moved = graph.nodes[index], index in casts.copies or index in casts.gradients
    return not (moved or node.op in (STATE, ROUND, RESTORE) or is_copy(node))


def peak_candidate_of(graph: Graph, index: int) -> PeakCandidate:
    """While the op at `index` is computed."""
    key = graph.nodes[index].key
    return PeakCandidate(key, _ops(graph)[key].index(index))


def node_at(graph: Graph, point: PeakCandidate) -> int:
    """The op that is computed then."""
    return _ops(graph)[point.key][point.number]


def known_in(graph: Graph, peak_candidates: Iterable[PeakCandidate]) -> Iterator[PeakCandidate]:
    """Those of `peak_candidates`, of the step in another form, that a graph has as well."""
    for candidate in peak_candidates:
        if candidate == ON_HOST or len(_ops(graph).get(candidate.key, ())) > candidate.number:
            yield candidate


@per_graph
def _ops(graph: Graph) -> Mapping[str, list[int]]:
    return grouped((node.key, node.index) for node in graph.with_role(Role.OP) if not node.view)
