"""Problems without windows that bound one with them.

The time hidden in a window is the minimum of its savings, which is at most any mean of them. With
the savings of each window in fixed `Shares`, costs add up, and no plan costs more than with
windows: this is the Lagrangian relaxation of the minimum. The shares with the highest bound are the
duals of the windows' rows in the linear program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.problem import FORBIDDEN, FloatArray, IntArray, Problem, Window
from autopar.solver.routing import all_distances

Shares = tuple[FloatArray, ...]
"""Per window the weight of each saving: at least 0, and 1 in sum."""


def first_shares(problem: Problem) -> Shares:
    """Shares that put all weight of a window on one resource: the busiest one, device or host, when
    each node takes its cheapest choice."""
    cheapest = [int(costs.argmin()) for costs in problem.costs]
    sums = (
        [sum(int(x[cheapest[i]]) for i, x in s.nodes.items()) for s in window.savings]
        for window in problem.windows
    )
    return tuple(np.eye(len(some))[some.index(min(some))] for some in sums)


def normalised(shares: Sequence[FloatArray]) -> Shares:
    """`shares` of any size, in proportion."""
    positive = [np.maximum(share, 0.0) for share in shares]
    return tuple(x / x.sum() if x.sum() > 0 else np.eye(len(x))[0] for x in positive)


def weighed(problem: Problem, shares: Shares) -> Problem:
    """The problem with the savings of each window in these shares, rounded down: no plan costs more
    there, on any routes. Arcs are forbidden if there is a faster path between their ends: tensors
    take the fastest paths, and a slow path that is hidden would cost nothing."""
    costs = [*problem.costs]
    distances = all_distances(problem.flows)
    arcs = [
        np.where(flow.costs > distance[flow.tails, flow.heads], FORBIDDEN, flow.costs)
        for flow, distance in zip(problem.flows, distances, strict=True)
    ]
    for window, share in zip(problem.windows, shares, strict=True):
        for saving, part in zip(window.savings, share.tolist(), strict=True):
            if part > 0:
                for node, saved in saving.nodes.items():
                    costs[node] = _less(costs[node], part * saved)
                for flow, saved in saving.flows.items():
                    arcs[flow] = np.maximum(0, _less(arcs[flow], part * saved))
    flows = (replace(flow, costs=own) for flow, own in zip(problem.flows, arcs, strict=True))
    return replace(problem, costs=tuple(costs), flows=tuple(flows), windows=())


def _less(costs: IntArray, saved: FloatArray) -> IntArray:
    return np.where(costs >= FORBIDDEN, FORBIDDEN, costs - np.ceil(saved).astype(np.int64))


def most_hidden(window: Window) -> int:
    """The most that any plan can hide in `window`, in nanoseconds."""
    return min(
        sum(int(saved.max()) for saved in saving.nodes.values())
        + sum(int(saved.sum()) for saved in saving.flows.values())
        for saving in window.savings
    )


def renumbered(
    windows: Sequence[Window], nodes: dict[int, int], flows: dict[int, int]
) -> tuple[Window, ...]:
    """`windows` where node `i` has become `nodes[i]`, and flow `f` `flows[f]`."""
    return tuple(
        replace(
            window,
            savings=tuple(
                replace(
                    saving,
                    nodes={nodes[i]: saved for i, saved in saving.nodes.items()},
                    flows={flows[f]: saved for f, saved in saving.flows.items()},
                )
                for saving in window.savings
            ),
        )
        for window in windows
    )


def with_choices(windows: Sequence[Window], kept: Sequence[IntArray]) -> tuple[Window, ...]:
    """`windows` where node `i` has its choices `kept[i]` alone."""
    return tuple(
        replace(
            window,
            savings=tuple(
                replace(saving, nodes={i: saved[kept[i]] for i, saved in saving.nodes.items()})
                for saving in window.savings
            ),
        )
        for window in windows
    )
