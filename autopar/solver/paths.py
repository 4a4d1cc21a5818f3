"""Reduces the program: to the arcs of a flow that may be needed, and to what cheap plans use.

An arc is never needed if there is a cheaper path between its ends. Of the others, those count that
lead from the states a tensor is made in to those of its uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, Flow, IntArray, Problem
from autopar.solver.windows import most_hidden

PathFinder = Callable[[Flow, IntArray, IntArray, Sequence[IntArray]], list[IntArray]]
"""Flow, distances between its states, states it is made in, states each commodity may need -> the
arcs of each commodity."""


def any_path(
    flow: Flow, distance: IntArray, sources: IntArray, targets: Sequence[IntArray]
) -> list[IntArray]:
    """Every arc that an optimal plan may need. A single commodity takes a shortest path; several
    may meet anywhere to share one."""
    direct = _direct_arcs(flow, distance)
    if len(targets) == 1:
        return [_shortest_arcs(flow, direct, distance, sources, targets[0])]
    return [_usable_arcs(flow, direct, distance, sources, states) for states in targets]


def shortest_paths(
    flow: Flow, distance: IntArray, sources: IntArray, targets: Sequence[IntArray]
) -> list[IntArray]:
    """The arcs on shortest paths between any of the states at the ends. These are fewer than may be
    needed: commodities share arcs on their paths, but make no detours to meet."""
    direct = _direct_arcs(flow, distance)
    ends = np.unique(np.concatenate([sources, *targets]))
    return [_shortest_arcs(flow, direct, distance, ends, states) for states in targets]


def _direct_arcs(flow: Flow, distance: IntArray) -> IntArray:
    """The arcs that are a cheapest path between their ends, the first of equal ones."""
    ends = flow.tails * len(flow.states) + flow.heads
    best = (flow.costs < FORBIDDEN) & (flow.costs == distance[flow.tails, flow.heads])
    best &= flow.tails != flow.heads
    arcs = np.flatnonzero(best)
    return np.sort(arcs[np.unique(ends[arcs], return_index=True)[1]])


def _usable_arcs(
    flow: Flow, arcs: IntArray, distance: IntArray, sources: IntArray, targets: IntArray
) -> IntArray:
    """The arcs that lie on a path from one of `sources` to one of `targets`."""
    ahead: BoolArray = np.any(distance[sources] < FORBIDDEN, axis=0)
    behind: BoolArray = np.any(distance[:, targets] < FORBIDDEN, axis=1)
    return arcs[ahead[flow.tails[arcs]] & behind[flow.heads[arcs]]]


def _shortest_arcs(
    flow: Flow, arcs: IntArray, distance: IntArray, sources: IntArray, targets: IntArray
) -> IntArray:
    """The arcs that lie on a shortest path from one of `sources` to one of `targets`."""
    there = distance[np.ix_(sources, targets)]
    needed = np.zeros(len(arcs), dtype=np.bool_)
    for source, lengths in zip(sources, there, strict=True):
        upto = distance[source, flow.tails[arcs]] + flow.costs[arcs]
        by_arc = upto[:, None] + distance[np.ix_(flow.heads[arcs], targets)]
        needed |= ((by_arc == lengths) & (lengths < FORBIDDEN)).any(axis=1)
    return arcs[needed]


# Before the program is built, all is forbidden that no plan uses which costs at most as much as the
# best one so far.

LARGEST_COST = 2**38
"""Larger costs would set the scale of all others: those that no plan uses are forbidden first."""


def largest_cost(problem: Problem) -> int:
    """The largest absolute cost of anything allowed."""
    parts = [*problem.costs, *(e.cost for e in problem.edges), *(f.costs for f in problem.flows)]
    return max((int(np.abs(p[p < FORBIDDEN]).max(initial=0)) for p in parts), default=0)


def forbid_above(problem: Problem, objective: int) -> Problem:
    """`problem` with every choice, pair and arc forbidden that no plan of at most `objective` uses.

    A plan costs at least the sum of the least costs of all nodes and edges.
    """
    least = sum(int(costs.min()) for costs in problem.costs)
    least += sum(int(edge.cost.min()) for edge in problem.edges)
    least -= sum(most_hidden(window) for window in problem.windows)
    room = objective - least
    return replace(
        problem,
        costs=tuple(_capped(costs, int(costs.min()) + room) for costs in problem.costs),
        edges=tuple(
            replace(edge, cost=_capped(edge.cost, int(edge.cost.min()) + room))
            for edge in problem.edges
        ),
        flows=tuple(replace(flow, costs=_capped(flow.costs, room)) for flow in problem.flows),
    )


def _capped(costs: IntArray, most: int) -> IntArray:
    return np.where(costs > min(most, FORBIDDEN), FORBIDDEN, costs)
