"""Exact reductions: each is a function `Problem -> (Problem, lift)`.

`lift` turns a choice of the smaller problem into one of the larger problem with the same cost. A
reduction keeps at least one plan of the lowest cost and, among those, of the lowest tie weight
(`ties`), so that it changes the time taken and not the answer. To add one: a file with the
function, and its entry in `PROBLEM_REDUCTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.problem import Problem
from autopar.solver.reductions.dominated import drop_dominated
from autopar.solver.reductions.edges import merge_edges
from autopar.solver.reductions.order import in_canonical_order

Lift = Callable[[tuple[int, ...]], tuple[int, ...]]
Reduction = Callable[[Problem], tuple[Problem, Lift]]

PROBLEM_REDUCTIONS: tuple[Reduction, ...] = (in_canonical_order, merge_edges, drop_dominated)


def reduce(problem: Problem) -> tuple[Problem, Lift]:
    """All of `PROBLEM_REDUCTIONS`, one after the other."""
    lifts: list[Lift] = []
    for reduction in PROBLEM_REDUCTIONS:
        problem, lift = reduction(problem)
        lifts.append(lift)

    def lift_all(choice: tuple[int, ...]) -> tuple[int, ...]:
        for lift in reversed(lifts):
            choice = lift(choice)
        return choice

    return problem, lift_all
