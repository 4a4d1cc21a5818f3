"""The solver against exhaustive enumeration, and what it promises about its answers."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Problem, Status
from autopar.solver import solve, tiebreak
from autopar.solver.clock import Clock
from autopar.solver.driver import in_canonical_order
from autopar.solver.exact import WINDOWED_TOLERANCE, Aim, find_exactly
from autopar.solver.search import SAME_COST, silent
from tests.solver.bruteforce import solve_by_enumeration, tie_weight
from tests.solver.random_problems import problems, windowed_problems

SETTINGS = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


FEW = settings(SETTINGS, max_examples=75)
"""Of what takes long, as many problems daily."""


@SETTINGS
@given(problems())
def test_equals_brute_force(problem: Problem) -> None:
    best = solve_by_enumeration(problem)
    solution = solve(problem)
    if best.objective is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.choice == ()
        assert solution.statistics["reason"]
        if best.least_peak is not None:
            assert solution.conflict is not None
            assert solution.conflict.limit == problem.usage_limit
            assert problem.usage_limit < solution.conflict.needed <= best.least_peak
        return
    assert solution.status is Status.OPTIMAL
    assert solution.objective == solution.bound == best.objective
    assert solution.choice in best.choices
    assert tie_weight(problem, solution.choice) == best.lowest_tie_weight(problem)
    assert "fault" not in solution.statistics


@FEW
@given(problems())
def test_ties_with_memory_held(problem: Problem) -> None:
    check_ties(problem)


@pytest.mark.nightly
@SETTINGS
@given(problems())
def test_ties_with_memory_held_in_any_problem(problem: Problem) -> None:
    check_ties(problem)


def check_ties(problem: Problem) -> None:
    """Where a large problem's relaxation has a gap, what takes memory is not moved by ties."""
    best = solve_by_enumeration(problem)
    with patch.object(tiebreak, "MAX_OPEN", 0):
        solution = solve(problem)
    if solution.statistics.get("ties") != "broken beside memory":
        return
    holders = [
        i
        for i, usages in enumerate(problem.usages)
        if any(u.start < u.stop and len(set(u.amounts.tolist())) > 1 for u in usages)
    ]
    alike = [c for c in best.choices if all(c[i] == solution.choice[i] for i in holders)]
    assert solution.choice in alike
    lowest = min(tie_weight(problem, choice) for choice in alike)
    assert tie_weight(problem, solution.choice) == lowest


@SETTINGS
@given(st.one_of(problems(), windowed_problems()), st.data())
def test_from_any_plan_that_is_known_to_the_best(problem: Problem, data: st.DataObject) -> None:
    """It may be one that is not allowed, and breaks no tie; what is far from the best is left."""
    ordered, _ = in_canonical_order(problem)
    known = tuple(data.draw(st.integers(0, len(costs) - 1)) for costs in ordered.costs)
    best = solve_by_enumeration(ordered)
    found = find_exactly(ordered, Clock(None), silent, Aim(known=known))
    assert (found.evaluation is None) == (best.objective is None) == found.infeasible
    if found.evaluation is not None and best.objective is not None:
        assert found.bound - SAME_COST <= best.objective <= found.evaluation.objective
        tolerance = WINDOWED_TOLERANCE if problem.windows else 0.0
        assert found.evaluation.objective <= best.objective * (1 + tolerance)


ANY_ORDER = given(problems(), st.randoms(use_true_random=False))


@FEW
@ANY_ORDER
def test_the_order_of_nodes_does_not_matter(problem: Problem, random: object) -> None:
    check_order(problem, random)


@pytest.mark.nightly
@SETTINGS
@ANY_ORDER
def test_the_order_of_nodes_matters_in_no_problem(problem: Problem, random: object) -> None:
    check_order(problem, random)


def check_order(problem: Problem, random: object) -> None:
    order = list(range(len(problem.keys)))
    random.shuffle(order)  # type: ignore[attr-defined]
    there = solve(problem)
    shuffled = solve(permuted(problem, order))
    assert shuffled.status is there.status
    assert shuffled.objective == there.objective
    if there.choice:
        assert tuple(there.choice[i] for i in order) == shuffled.choice


def permuted(problem: Problem, order: list[int]) -> Problem:
    place = {node: at for at, node in enumerate(order)}
    pick = lambda values: tuple(values[i] for i in order)  # noqa: E731
    return replace(
        problem,
        keys=pick(problem.keys),
        labels=pick(problem.labels),
        costs=pick(problem.costs),
        usages=pick(problem.usages),
        edges=tuple(
            replace(e, source=place[e.source], target=place[e.target]) for e in problem.edges[::-1]
        ),
        flows=tuple(
            replace(
                f,
                source=place[f.source],
                sinks=tuple(replace(s, node=place[s.node]) for s in f.sinks[::-1]),
            )
            for f in problem.flows[::-1]
        ),
    )
