"""What the relaxation says of plans with fewer choices, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.problem import FORBIDDEN, Problem, Status
from autopar.solver.sensitivity import Sensitivity
from tests.solver.bruteforce import solve_by_enumeration
from tests.solver.random_problems import problems


def without(problem: Problem, node: int, left: np.ndarray) -> Problem:
    costs = list(problem.costs)
    costs[node] = np.where(left, costs[node], FORBIDDEN)
    return replace(problem, costs=tuple(costs))


@given(problem=problems(), data=st.data())
def test_restrictions_are_bounded_and_a_plan_of_theirs_is_found(
    problem: Problem, data: st.DataObject
) -> None:
    base = solve_by_enumeration(problem).objective
    assume(base is not None)
    variations = Sensitivity(problem)
    assert variations.bound <= base
    for node, costs in enumerate(problem.costs):
        left = np.array(
            data.draw(st.lists(st.booleans(), min_size=len(costs), max_size=len(costs)))
        )
        oracle = solve_by_enumeration(without(problem, node, left)).objective
        found = variations.with_only({node: left})
        assert found is not None or oracle is None
        if found is None or oracle is None:
            assert found is None or found.solution is None
            continue
        assert found.bound <= oracle
        if found.solution is not None:
            assert left[found.solution.choice[node]]
            assert found.solution.objective >= oracle
            if found.solution.status is Status.OPTIMAL:
                assert found.solution.objective == oracle
        again = variations.with_only({node: left})
        assert again == found


@given(problem=problems(), more=st.integers(-3, 8))
def test_another_limit_is_bounded(problem: Problem, more: int) -> None:
    assume(problem.usage_limit is not None)
    assert problem.usage_limit is not None
    assume(solve_by_enumeration(problem).objective is not None)
    limit = max(0, problem.usage_limit + more * max(1, problem.usage_limit // 8))
    oracle = solve_by_enumeration(replace(problem, usage_limit=limit)).objective
    assume(oracle is not None)
    assert Sensitivity(problem).bound_with_limit(limit) <= oracle
