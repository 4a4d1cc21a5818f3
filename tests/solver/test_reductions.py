"""Reductions against the oracle: the same lowest cost, and lifted plans that cost what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from autopar.ir.problem import Problem
from autopar.solver import evaluate
from autopar.solver.reductions.dominated import drop_dominated
from autopar.solver.reductions.edges import merge_edges

from .bruteforce import solve_by_enumeration
from .random_problems import chained_problems, problems, windowed_problems

Lift = Callable[[tuple[int, ...]], tuple[int, ...]]
SETTINGS = settings(max_examples=150, deadline=None)


def check(problem: Problem, reduced: Problem, lift: Lift) -> None:
    """Every plan of `reduced` lifts to one of the same cost; the cheapest is the cheapest."""
    best, least = solve_by_enumeration(problem), solve_by_enumeration(reduced)
    assert least.objective == best.objective
    for choice in least.choices:
        there = evaluate(problem, lift(choice))
        assert there.feasible, there.violation
        assert there.objective == least.objective


@pytest.mark.parametrize("reduction", [merge_edges, drop_dominated])
def test_exact(reduction: Callable[[Problem], tuple[Problem, Lift]]) -> None:
    @SETTINGS
    @given(problems() | chained_problems() | windowed_problems())
    def holds(problem: Problem) -> None:
        check(problem, *reduction(problem))

    holds()
