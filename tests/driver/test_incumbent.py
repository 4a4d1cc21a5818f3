"""The incumbent of a search: what stays, what is cut off, what is told of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.driver.search.incumbent import (
    CandidateAttempt,
    CandidateSearch,
    Stopped,
    Trail,
    line_search,
)
from autopar.errors import InfeasibleError, StageError
from autopar.plans.memory_refinement import Beaten
from autopar.plans.provenance import CandidateOutcome
from autopar.solver.search import silent


def searching(cutoff: int | None = None, slack: float = 0.0) -> CandidateSearch[int]:
    return CandidateSearch(
        Trail(silent), lambda n: n, bound_ns=lambda n: n - 1, is_tight=lambda n: n % 2 > 0,
        cutoff=cutoff, slack=slack,
    )  # fmt: skip


def costing(cost: int) -> Callable[[int | None], int]:
    """A candidate of such a cost, which is cut off where it has to cost less."""

    def make(cutoff: int | None) -> int:
        if cutoff is not None and cost >= cutoff:
            raise Beaten(f"{cost}", cost - 1, is_tight=cost % 2 > 0)
        return cost

    return make


def refused(_: int | None) -> int:
    raise InfeasibleError("does not fit")


def attempt(
    search: CandidateSearch[int], make: Callable[[int | None], int], **how: Any
) -> CandidateAttempt[int]:
    with search.attempt(**how) as tried:
        tried.result = make(tried.needed_ns)
    return tried


@given(st.lists(st.integers(10, 30), min_size=1), st.sampled_from((None, 15, 20)))
def test_the_least_is_found_or_it_is_said_that_none_is_below(
    costs: list[int], cutoff: int | None
) -> None:
    search = searching(cutoff)
    for cost in costs:
        attempt(search, costing(cost))
    assert search.least_ns <= min(costs)
    if cutoff is None or min(costs) < cutoff:
        assert search.result() == min(costs)
        assert search.rank == costs.index(min(costs))
    else:
        with pytest.raises(Beaten) as beaten:
            search.result("all")
        assert cutoff - 1 <= beaten.value.bound <= min(costs)


def test_ctrl_c_ends_a_search_with_the_best_so_far() -> None:
    search = searching()
    search.trail = trail = Trail(silent, stops=True)

    def interrupted(_: int | None) -> int:
        raise KeyboardInterrupt

    with pytest.raises(Stopped):
        attempt(search, interrupted)
        search.result()
    search = searching()
    search.trail = trail = Trail(silent, stops=True)
    attempt(search, costing(20), name="first")
    attempt(search, interrupted, name="second")
    assert trail.is_stopped and not trail.is_limited and search.result() == 20
    with pytest.raises(Stopped):
        trail.go_on()
    assert [each.result for each in trail.outcomes] == ["planned", "skipped"]


def test_what_was_looked_at_is_not_noted_as_skipped() -> None:
    trail = Trail(silent, work_limit_s=1)
    trail.note("first", "planned", 5)
    trail.note("second", "not better", 6)
    trail.count(2 * 10**9)
    for name in ("second", "third"):
        with pytest.raises(Stopped):
            trail.go_on(name)
    assert [each.result for each in trail.outcomes] == ["planned", "not better", "skipped"]


def test_ctrl_c_while_a_plan_is_reported_loses_no_plan() -> None:
    def say(_: str) -> None:
        raise KeyboardInterrupt

    search = searching()
    search.trail = Trail(say, stops=True)
    attempt(search, costing(20), name="first")
    assert search.trail.is_stopped and search.result() == 20
    search.trail = Trail(say)
    with pytest.raises(KeyboardInterrupt):
        attempt(search, costing(19), name="second")


def test_ctrl_c_ends_the_process_where_a_best_so_far_is_no_answer() -> None:
    search = searching()
    attempt(search, costing(20))
    with pytest.raises(KeyboardInterrupt), search.attempt():
        raise KeyboardInterrupt


def test_of_equals_the_lower_rank_stays() -> None:
    search = searching()
    for rank in (2, 1, 3):
        attempt(search, costing(20), rank=rank)
    assert search.rank == 1
    assert search.bounds == {2: 19, 1: 19, 3: 19}


def test_with_slack_what_is_a_little_worse_is_planned_too() -> None:
    search = searching(slack=0.1)
    assert attempt(search, costing(20)).result == 20
    assert attempt(search, costing(21)).result == 21
    assert attempt(search, costing(22)).result is None
    assert attempt(search, costing(19), slack=-0.1).result is None
    assert search.result() == 20


def test_what_does_not_fit_is_worse_than_all_that_does() -> None:
    search = CandidateSearch[int](Trail(silent), lambda n: n, fits=lambda n: n > 15)
    attempt(search, costing(10))
    # It cuts nothing off either.
    assert attempt(search, costing(20)).is_better
    assert search.result() == 20


def test_a_line_goes_on_while_memory_binds_and_each_is_better() -> None:
    tried: list[int] = []

    def in_sequence(*costs: int, cutoff: int | None = None) -> list[int]:
        tried.clear()
        search = searching(cutoff)
        for cost in search.in_sequence(costs):
            tried.append(cost)
            attempt(search, costing(cost) if cost else refused)
        return list(tried)

    assert in_sequence(0, 25, 23, 22, 21) == [0, 25, 23, 22]
    assert in_sequence(23, 25, 21) == [23, 25]
    # What is cut off, and might not be were there more memory, does not end it before there is one.
    assert in_sequence(25, 23, 21, 19, cutoff=22) == [25, 23, 21, 19]
    assert in_sequence(25, 24, 21, cutoff=22) == [25, 24]


def test_a_line_from_a_likely_place_goes_in_both_directions() -> None:
    def from_likely(start: int, *costs: int) -> list[int]:
        tried, search = list[int](), searching()
        for cost in search.from_likely(costs, start):
            tried.append(cost)
            attempt(search, costing(cost) if cost else refused)
        return tried

    assert from_likely(2, 25, 23, 21, 22, 24) == [21, 22, 23]
    assert from_likely(2, 21, 23, 25, 26) == [25, 26, 23, 21]
    assert from_likely(3, 19, 21, 23, 25, 24) == [25, 24], "what is better than the first ends it"
    assert from_likely(1, 19, 0, 21, 24) == [0, 21, 24], "fewer hold more than what does not fit"
    assert from_likely(0, 21, 22) == [21, 22]


def test_the_first_failure_is_told_where_there_is_no_plan() -> None:
    search = searching()
    search.refuse(StageError("later"), rank=5)
    attempt(search, refused, rank=1)
    with pytest.raises(InfeasibleError, match="does not fit"):
        search.result()
    with pytest.raises(StageError, match="not shared"):
        searching().result()


def test_what_becomes_of_candidates_is_kept_under_their_names() -> None:
    said: list[str] = []
    trail = Trail(said.append)
    search = CandidateSearch[int](trail, lambda n: n)
    trail.note("b", "estimated", 30)
    for name, make in (("a", costing(20)), ("b", costing(10)), ("c", costing(25)), ("d", refused)):
        attempt(search, make, name=name)
    attempt(search, costing(5))
    trail.note("b", "not better", 1)
    trail.skip("others", "a threshold")
    assert trail.outcomes == (
        CandidateOutcome("b", "planned", 10), CandidateOutcome("a", "planned", 20),
        CandidateOutcome("c", "not better", 24),
        CandidateOutcome("d", "infeasible", None, "does not fit"),
        CandidateOutcome("others", "skipped", None, "a threshold"),
    )  # fmt: skip
    assert said == [
        "a: 20 ns", "b: 10 ns", "25: nothing better; at least 24 ns", "does not fit",
        "others are not looked at: a threshold",
    ]  # fmt: skip


def tried(costs: list[int], start: int) -> list[int]:
    """The places that are tried, where a place improves that costs less than all before."""
    found: list[int] = []

    def improved() -> bool:
        *before, last = found
        return all(costs[last] < costs[other] for other in before)

    for place in line_search(range(len(costs)), start, improved):
        found.append(place)  # noqa: PERF402 (`improved` reads it meanwhile)
    return found


def test_each_way_ends_where_nothing_is_better() -> None:
    assert tried([9, 3, 5, 6, 4, 1], 2) == [2, 3, 1, 0]


def test_the_other_way_is_not_tried_where_one_is_better() -> None:
    assert tried([9, 3, 5, 4, 6, 1], 2) == [2, 3, 4]
    # All that is there in one way may not fit in memory.
    assert tried([2, 9, 8, 7], 1) == [1, 2, 3, 0]
    assert tried([1, 2, 3, 4], 3) == [3, 2, 1, 0]
    assert tried([7], 0) == [0]
