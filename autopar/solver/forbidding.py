"""What is forbidden before a program is made of a problem: all that no plan uses that costs no more
than one in hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.ir.problem import FORBIDDEN, IntArray, Problem
from autopar.solver.windows import most_hidden

LARGEST_COST = 2**38
"""Costs beyond this would set the scale of all others: what no plan can use is forbidden first."""


def largest_cost(problem: Problem) -> int:
    """The largest absolute cost of anything allowed."""
    parts = [*problem.costs, *(e.cost for e in problem.edges), *(f.costs for f in problem.flows)]
    return max((int(np.abs(p[p < FORBIDDEN]).max(initial=0)) for p in parts), default=0)


def forbid_above(problem: Problem, objective: int) -> Problem:
    """`problem` with every choice, pair and arc forbidden that no plan of at most `objective` uses.

    A plan costs at least the sum of what each node and each edge costs at the least.
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
