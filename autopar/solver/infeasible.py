"""Why a problem has no plan: the memory limit and the smallest peak, or the choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import FORBIDDEN, Conflict, Problem, Solution, Status
from autopar.solver.adapter import SOLVER, Highs, Outcome
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluator, peak_usage
from autopar.solver.heuristic import Descent
from autopar.solver.ilp import build_model
from autopar.solver.memory import peak_conflict
from autopar.solver.relaxation import express, rounded
from autopar.solver.routing import all_distances

_SHOWN = 4


def explain_conflict(problem: Problem, clock: Clock) -> tuple[Conflict | None, str]:
    """The conflict, when memory is the reason, and the reason in words.

    An integer program of its own minimizes the peak of an allowed plan. `needed` is that peak, the
    smallest limit that would do. When the clock ends that search early, `needed` is the peak of the
    best plan so far, which may be more.
    """
    for key, costs in zip(problem.keys, problem.costs, strict=True):
        if (costs >= FORBIDDEN).all():
            return None, f"every choice of node {key} is forbidden"
    if problem.usage_limit is not None:
        model = build_model(problem, excess=True)
        highs = Highs({"mip_feasibility_tolerance": 1e-9}, clock)
        highs.relax(express(model))
        known = _allowed(problem, clock)
        if known:
            columns = [of_node[c] for of_node, c in zip(model.choices, known, strict=True)]
            point = highs.point_with(np.array(columns))
            if len(point):
                highs.start_at(point)
        answer = highs.solve_integer()
        choice = rounded(model, answer.values) if len(answer.values) else known
        if choice:
            peak, time = peak_usage(problem, choice)
            proven = answer.outcome is Outcome.OPTIMAL
            least = f"the smallest-memory plan {'' if proven else 'found in time '}needs {peak}"
            reason = f"{least} at time {time}, the limit is {problem.limit_at(time)}"
            return peak_conflict(problem, choice, time, peak), reason
        if answer.outcome is not Outcome.INFEASIBLE:
            return None, "no plan was found in time that is allowed, whatever memory it takes"
    return None, f"no combination of choices is allowed, whatever memory it takes{_where(problem)}"


def infeasible_solution(
    statistics: dict[str, int | float | str], conflict: Conflict | None, reason: str
) -> Solution:
    """The answer that there is no plan, with the reason."""
    return Solution(
        Status.INFEASIBLE,
        solver=SOLVER,
        statistics={**statistics, "reason": reason},
        conflict=conflict,
    )


def _allowed(problem: Problem, clock: Clock) -> tuple[int, ...]:
    """An allowed plan, whatever memory it takes; empty if neither start is one."""
    anyhow = replace(problem, usage_limit=None)
    evaluator = Evaluator(anyhow)
    descent = Descent(anyhow, evaluator, clock)
    # Without descent, which lowers costs and mostly takes more memory.
    starts = (descent.smallest_memory(), descent.grown())
    return next((start for start in starts if evaluator(start).feasible), ())


def _where(problem: Problem) -> str:
    """The text for two nodes whose remaining choices exclude each other, after choices that fit
    none of a neighbour's are dropped. Empty if every node keeps choices."""
    left = [costs < FORBIDDEN for costs in problem.costs]
    links = list(_links(problem))
    changed = True
    while changed:
        changed = False
        for a, b, allowed in links:
            for one, other, table in ((a, b, allowed), (b, a, allowed.T)):
                kept = left[one] & table[:, left[other]].any(axis=1)
                if not kept.any():
                    pair = " and ".join(_shown(problem, node, left[node]) for node in (one, other))
                    return f": no choice that is left to {pair} goes with one of the other"
                changed |= bool((kept < left[one]).any())
                left[one] = kept
    return ""


def _links(problem: Problem) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Pairs of nodes, and which choices of one are possible with which of the other."""
    for edge in problem.edges:
        yield edge.source, edge.target, edge.cost < FORBIDDEN
    for flow, distance in zip(problem.flows, all_distances(problem.flows), strict=True):
        source = flow.source_state
        for sink in flow.sinks:
            nothing = (source < 0)[:, None] | (sink.state < 0)[None, :]
            is_reachable = distance[source[:, None], sink.state[None, :]] < FORBIDDEN
            yield flow.source, sink.node, nothing | is_reachable


def _shown(problem: Problem, node: int, left: NDArray[np.bool_]) -> str:
    labels = [str(problem.labels[node][c]) for c in np.flatnonzero(left)]
    return f"{problem.keys[node]} ({'; '.join(labels[:_SHOWN])}{'; ...' * (len(labels) > _SHOWN)})"
