"""What is set aside for what a problem does not count, when no plan leaves that much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from autopar.errors import InfeasibleError
from autopar.ir.peak_candidates import PeakCandidate
from autopar.ir.problem import Conflict, Problem, Solution, Status
from autopar.plans.memory_refinement import Beaten, MemoryRefinement
from autopar.plans.requests.request import PlanRequest

MOMENT = cast(PeakCandidate, "the fullest")
NO_PLAN = Solution(Status.INFEASIBLE, conflict=Conflict(0, needed=90, limit=80))


class Request:
    name = "mesh of one device"


class Stated:
    usage_limit, other_limits = 80, ()


def fitting(aside: int, **known: Any) -> MemoryRefinement:
    def restate(stated: Any, _: Any) -> Any:
        return stated

    request = cast(PlanRequest, Request())
    stated = cast(Problem, Stated())
    return replace(MemoryRefinement(request, stated, restate, str), rows={MOMENT: aside}, **known)


def test_what_a_rough_plan_showed_was_a_guess() -> None:
    known = fitting(30, is_guess=True)
    assert known.rules_out(NO_PLAN, None) and known.rows == {MOMENT: 0}
    with pytest.raises(InfeasibleError):
        known.rules_out(NO_PLAN, None)


def test_what_another_plan_showed_is_lessened_by_what_is_missing() -> None:
    known = fitting(30)
    assert known.rules_out(NO_PLAN, None) and known.rows == {MOMENT: 20}


@pytest.mark.parametrize(("aside", "bound"), [(0, 70), (30, 60)])
def test_the_bound_of_a_problem_with_less_memory_is_none_of_all_plans(
    aside: int, bound: int
) -> None:
    known = fitting(aside, bound=60)
    with pytest.raises(Beaten) as raised:
        known.rules_out(Solution(Status.BEATEN, bound=70), 75)
    assert raised.value.bound == bound


def test_a_plan_within_the_limit_that_costs_no_less_ends_it() -> None:
    plan = Solution(Status.FEASIBLE, choice=(0,), objective=75, bound=70)
    known = fitting(30, bound=60)
    with pytest.raises(Beaten) as raised:
        known.rules_out(plan, 75)
    assert raised.value.bound == 60
    assert not known.rules_out(plan, 76) and not known.rules_out(plan, None)
    assert not known.rules_out(replace(plan, is_rough=True), 75)


def test_what_a_plan_on_the_same_mesh_had_in_flight_is_set_aside_but_rules_nothing_out() -> None:
    rough = Solution(Status.FEASIBLE, choice=(0,), objective=75, bound=70, is_rough=True)
    known = fitting(0, guess={MOMENT: 30}, bound=60)
    assert not known.takes_guess(replace(rough, is_rough=False)) and known.rows == {MOMENT: 0}
    assert known.takes_guess(rough) and known.rows == {MOMENT: 30} and known.bound == 70
    assert not known.takes_guess(rough), "only once"
    assert known.rules_out(Solution(Status.BEATEN, bound=80), 75) and known.rows == {MOMENT: 0}
    with pytest.raises(Beaten) as raised:
        known.rules_out(Solution(Status.BEATEN, bound=80), 75)
    assert raised.value.bound == 80
    assert not fitting(0, guess={MOMENT: 0}).takes_guess(rough), "it would change nothing"
