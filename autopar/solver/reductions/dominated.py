"""Drops choices that are forbidden, or that another choice of the same node beats in every plan.

Choice `a` beats `b` when a plan with `b` stays a plan with `a` in its place, and gets cheaper, or
costs the same and weighs less as ties go (`ties`). What the exchange costs at the most is

* the difference of the node's own costs;
* per edge, the largest difference over the other node's choices;
* per window, the largest by which one of its savings falls;
* per flow made here, the way from the state `a` leaves it in to the state `b` does;
* per flow used here, the way on from the state `b` asks for to the state `a` asks for; with windows
  these must be the same states.

The plan that the solver looks for, cheapest and of these of lowest weight, uses no beaten choice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from autopar.ir.problem import FORBIDDEN, IntArray, Problem
from autopar.solver.distances import all_distances
from autopar.solver.reductions.tables import keep_choices
from autopar.solver.ties import tie_weights


def drop_dominated(
    problem: Problem,
) -> tuple[Problem, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Keeps the choices that are neither forbidden nor beaten. A node with none allowed stays."""
    possible = _possible(problem)
    exchange = _exchange_costs(problem)
    weights = tie_weights(problem)
    kept: list[IntArray] = []
    for node, (costs, more) in enumerate(zip(problem.costs, exchange, strict=True)):
        allowed = possible[node]
        if not allowed.any():
            kept.append(np.arange(len(costs)))
            continue
        order = np.lexsort((np.arange(len(costs)), weights[node]))
        rank = np.empty(len(costs), dtype=np.int64)
        rank[order] = np.arange(len(costs))
        beats = (more < 0) | ((more == 0) & (rank[:, None] < rank[None, :]))
        beats &= allowed[:, None] & _uses_no_more(problem, node)
        kept.append(np.flatnonzero(allowed & ~beats.any(axis=0)))
    return keep_choices(problem, kept), lambda choice: tuple(
        int(kept[node][c]) for node, c in enumerate(choice)
    )


def _possible(problem: Problem) -> list[npt.NDArray[np.bool_]]:
    """Per node, which choices are allowed by themselves and by at least one choice of every other
    node they share an edge with."""
    found = [costs < FORBIDDEN for costs in problem.costs]
    for edge in problem.edges:
        found[edge.source] &= (edge.cost < FORBIDDEN).any(axis=1)
        found[edge.target] &= (edge.cost < FORBIDDEN).any(axis=0)
    return found


def _uses_no_more(problem: Problem, node: int) -> npt.NDArray[np.bool_]:
    count = len(problem.costs[node])
    no_more = np.ones((count, count), dtype=np.bool_)
    if problem.usage_limit is not None:
        for usage in problem.usages[node]:
            if usage.start < usage.stop:
                no_more &= usage.amounts[:, None] <= usage.amounts[None, :]
    return no_more


def _exchange_costs(problem: Problem) -> list[IntArray]:
    """Per node, at `[a, b]`, what putting `a` in the place of `b` costs at the most."""
    found = [_difference(costs[:, None]) for costs in problem.costs]
    for edge in problem.edges:
        if edge.source == edge.target:
            # Both ends would change at once: no exchange is judged at such a node.
            found[edge.source] = np.full_like(found[edge.source], FORBIDDEN)
            continue
        found[edge.source] = _plus(found[edge.source], _difference(edge.cost))
        found[edge.target] = _plus(found[edge.target], _difference(edge.cost.T))
    for window in problem.windows:
        for node in sorted({i for saving in window.savings for i in saving.nodes}):
            nothing = np.zeros(len(problem.costs[node]), np.int64)
            saved = (saving.nodes.get(node, nothing) for saving in window.savings)
            found[node] = _plus(found[node], _difference(-np.stack([*saved], axis=1)))
    for flow, distance in zip(problem.flows, all_distances(problem.flows), strict=True):
        size = len(flow.states)
        # Row and column -1 stand for "no state".
        way = np.zeros((size + 1, size + 1), dtype=np.int64)
        way[:size, :size] = distance
        if problem.windows:
            # Another way may be hidden less, however short it is.
            way[:size, :size] = np.where(np.eye(size, dtype=np.bool_), 0, FORBIDDEN)
        made, asked = way.copy(), way.copy()
        made[size, :size] = FORBIDDEN
        asked[size, :size] = FORBIDDEN
        state = flow.source_state
        found[flow.source] = _plus(found[flow.source], made[state[:, None], state[None, :]])
        sinks = {(sink.node, sink.state.tobytes()): sink.state for sink in flow.sinks}
        for (node, _), state in sinks.items():
            found[node] = _plus(found[node], asked[state[None, :], state[:, None]])
    return found


def _difference(costs: IntArray) -> IntArray:
    """At `[a, b]`, the most that row `a` costs above row `b`."""
    more = costs[:, None, :] - costs[None, :, :]
    more = np.where(costs[None, :, :] >= FORBIDDEN, -FORBIDDEN, more)
    more = np.where((costs[:, None, :] >= FORBIDDEN) & (more > -FORBIDDEN), FORBIDDEN, more)
    return more.max(axis=2)


def _plus(a: IntArray, b: IntArray) -> IntArray:
    """The sum; `FORBIDDEN` stays, and what falls below `-FORBIDDEN` is brought back to it."""
    total = np.where((a >= FORBIDDEN) | (b >= FORBIDDEN), FORBIDDEN, a + b)
    return np.clip(total, -FORBIDDEN, FORBIDDEN)
