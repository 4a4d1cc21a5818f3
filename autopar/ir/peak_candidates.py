"""Peak candidates: the ops during which memory may peak, each computed where the graph has it. What
the host holds counts for the whole step, `ON_HOST`, with a limit of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Role, per_graph
from autopar.ir.grouping import grouped
from autopar.ir.own_ops import RESTORE, ROUND, STATE, is_copy


class PeakCandidate(NamedTuple):
    """Op `number` of those with `key`, in the order of the graph, while it is computed."""

    key: str
    number: int


ON_HOST = PeakCandidate("on host", 0)
"""The whole step, in which a device may have no more than its share of its host's memory."""


def is_peak_candidate(graph: Graph, index: int) -> bool:
    """Whether an op is computed in its place, whatever is decided. A recomputed copy is not: it
    stands in front of the first op that reads it. Nor are casts of parameters and of gradients,
    which go with their collectives. States of generators and casts of saved activations exist only
    if decisions need them."""
    casts = casts_of(graph)
    node, moved = graph.nodes[index], index in casts.copies or index in casts.gradients
    return not (moved or node.op in (STATE, ROUND, RESTORE) or is_copy(node))


def peak_candidate_of(graph: Graph, index: int) -> PeakCandidate:
    """The peak candidate of the op at `index`."""
    key = graph.nodes[index].key
    return PeakCandidate(key, _ops(graph)[key].index(index))


def node_at(graph: Graph, point: PeakCandidate) -> int:
    """The index of the op of a peak candidate."""
    return _ops(graph)[point.key][point.number]


def known_in(graph: Graph, peak_candidates: Iterable[PeakCandidate]) -> Iterator[PeakCandidate]:
    """The `peak_candidates` that `graph` has too. They come from another form of its step."""
    for candidate in peak_candidates:
        if candidate == ON_HOST or len(_ops(graph).get(candidate.key, ())) > candidate.number:
            yield candidate


@per_graph
def _ops(graph: Graph) -> Mapping[str, list[int]]:
    return grouped((node.key, node.index) for node in graph.with_role(Role.OP) if not node.view)
