"""Which arcs of a flow enter the program.

An arc between whose ends there is a cheaper way is never needed. What is left is cut down to the
arcs that lead from where the tensor is made to where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, Flow, IntArray

Ways = Callable[[Flow, IntArray, IntArray, Sequence[IntArray]], list[IntArray]]
"""Flow, distances between its states, states it is made in, states each commodity may ask for ->
the arcs of each commodity."""


def any_way(
    flow: Flow, distance: IntArray, sources: IntArray, asked: Sequence[IntArray]
) -> list[IntArray]:
    """Every arc an optimal plan may need. Alone, a commodity takes a shortest way; several may meet
    anywhere to share one."""
    direct = _direct_arcs(flow, distance)
    if len(asked) == 1:
        return [_shortest_arcs(flow, direct, distance, sources, asked[0])]
    return [_usable_arcs(flow, direct, distance, sources, states) for states in asked]


def shortest_ways(
    flow: Flow, distance: IntArray, sources: IntArray, asked: Sequence[IntArray]
) -> list[IntArray]:
    """The arcs on shortest ways between any of the states at the ends: fewer than may be needed, so
    that commodities share what lies on their ways but go no further to meet."""
    direct = _direct_arcs(flow, distance)
    ends = np.unique(np.concatenate([sources, *asked]))
    return [_shortest_arcs(flow, direct, distance, ends, states) for states in asked]


def _direct_arcs(flow: Flow, distance: IntArray) -> IntArray:
    """The arcs than which no way between their ends is cheaper, the first of equal ones."""
    ends = flow.tails * len(flow.states) + flow.heads
    best = (flow.costs < FORBIDDEN) & (flow.costs == distance[flow.tails, flow.heads])
    best &= flow.tails != flow.heads
    arcs = np.flatnonzero(best)
    return np.sort(arcs[np.unique(ends[arcs], return_index=True)[1]])


def _usable_arcs(
    flow: Flow, arcs: IntArray, distance: IntArray, sources: IntArray, targets: IntArray
) -> IntArray:
    """The arcs that lie on a way from one of `sources` to one of `targets`."""
    ahead: BoolArray = np.any(distance[sources] < FORBIDDEN, axis=0)
    behind: BoolArray = np.any(distance[:, targets] < FORBIDDEN, axis=1)
    return arcs[ahead[flow.tails[arcs]] & behind[flow.heads[arcs]]]


def _shortest_arcs(
    flow: Flow, arcs: IntArray, distance: IntArray, sources: IntArray, targets: IntArray
) -> IntArray:
    """The arcs that lie on a shortest way from one of `sources` to one of `targets`."""
    there = distance[np.ix_(sources, targets)]
    needed = np.zeros(len(arcs), dtype=np.bool_)
    for source, lengths in zip(sources, there, strict=True):
        upto = distance[source, flow.tails[arcs]] + flow.costs[arcs]
        by_arc = upto[:, None] + distance[np.ix_(flow.heads[arcs], targets)]
        needed |= ((by_arc == lengths) & (lengths < FORBIDDEN)).any(axis=1)
    return arcs[needed]
