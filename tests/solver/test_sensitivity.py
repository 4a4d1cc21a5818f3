"""What the relaxation says of plans with fewer choices, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import FORBIDDEN, Problem, Status
from autopar.solver.sensitivity import Sensitivity
from tests.solver.bruteforce import solve_by_enumeration
from tests.solver.random_problems import problems


def without(problem: Problem, node: int, left: np.ndarray) -> Problem:
    costs = list(problem.costs)
    costs[node] = np.where(left, costs[node], FORBIDDEN)
    return replace(problem, costs=tuple(costs))


def sizes(problem: Problem) -> list[int]:
    return [len(costs) for costs in problem.costs]


@settings(max_examples=200)
@given(problem=problems(), data=st.data())
def test_restrictions_are_bounded_and_a_plan_of_theirs_is_found(
    problem: Problem, data: st.DataObject
) -> None:
    base = solve_by_enumeration(problem).objective
    if base is None:
        return
    variations = Sensitivity(problem)
    assert variations.bound <= base
    asked = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes(problem)]
    found = [variations.with_only({i: np.array(left)}) for i, left in enumerate(asked)]
    for node, (left, known) in enumerate(zip(asked, found, strict=True)):
        oracle = solve_by_enumeration(without(problem, node, np.array(left))).objective
        if known is None or oracle is None:
            assert oracle is None and (known is None or known.solution is None)
            continue
        assert known.bound <= oracle
        if known.solution is not None:
            assert left[known.solution.choice[node]]
            assert known.solution.objective >= oracle
            if known.solution.status is Status.OPTIMAL:
                assert known.solution.objective == oracle
    # No answer depends on those before.
    for node, left in reversed(list(enumerate(asked))):
        assert variations.with_only({node: np.array(left)}) == found[node]


@settings(max_examples=200)
@given(problem=problems(), tightness=st.integers(0, 8), more=st.integers(-3, 8))
def test_another_limit_is_bounded(problem: Problem, tightness: int, more: int) -> None:
    needed = sum(int(usage.amounts.max()) for usages in problem.usages for usage in usages)
    limit = needed * tightness // 8
    problem = replace(problem, usage_limit=limit)
    if solve_by_enumeration(problem).objective is None:
        return
    other = max(0, limit + more * max(1, limit // 8))
    oracle = solve_by_enumeration(replace(problem, usage_limit=other)).objective
    if oracle is not None:
        assert Sensitivity(problem).bound_with_limit(other) <= oracle
