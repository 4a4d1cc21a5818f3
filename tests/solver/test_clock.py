"""A limit of time is that of all that is done: no run of HiGHS may take what others have used up.

Seconds pass by a clock that the tests move, so that what is handed out is known to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import highspy
import numpy as np
import pulp
import pytest

from autopar.ir.problem import FORBIDDEN, Problem, Status
from autopar.solver import adapter, driver, solve, tiebreak
from autopar.solver.adapter import Highs, Outcome
from autopar.solver.clock import Clock
from autopar.solver.column_generation import path
from autopar.solver.infeasible import explain_conflict
from autopar.solver.modelling import as_arrays
from tests.solver.fake_clock import FakeClock, Runs, fake_clock, watch_runs
from tests.solver.making import edge, problem
from tests.solver.synthetic import transformer
from tests.solver.test_adapter import knapsack

LIMIT_S = 1000.0


def holds(runs: Runs, limit_s: float = LIMIT_S) -> bool:
    """Whether every run was allowed what was left, and nothing more."""
    allowed = [run.allowed_s for run in runs.seen]
    left = [max(0.0, limit_s - run.began_s) for run in runs.seen]
    return bool(allowed) and allowed == pytest.approx(left, abs=1e-6)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_clock(monkeypatch)


def test_what_is_left_of_a_limit(fake: FakeClock) -> None:
    clock = Clock(10.0)
    fake.now_s += 4.0
    assert clock.left_s() == 6.0 and not clock.expired
    with clock.stopped():
        fake.now_s += 100.0
    assert clock.left_s() == 6.0
    fake.now_s += 7.0
    assert clock.left_s() == 0.0 and clock.expired
    assert Clock(None).left_s() == float("inf")


def test_runs_of_every_kind_share_one_limit(
    fake: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaxation, integer programs after it and after each other, relaxations after those, warm
    and from scratch, and the interior point method after an integer program."""
    runs = watch_runs(monkeypatch, fake, each_s=3.0)
    highs = Highs(clock=Clock(LIMIT_S))
    assert highs.relax(knapsack(20)).outcome is Outcome.OPTIMAL
    for run in (highs.solve_integer, highs.solve_integer, highs.solve_relaxed, highs.solve_warm):
        assert run().outcome is Outcome.OPTIMAL
    highs.solve_integer()
    assert len(highs.solve_relaxed().row_duals)
    highs._run_interior()
    assert highs.last.outcome is Outcome.OPTIMAL
    kinds = ["choose", "integer", "integer", "choose", "choose", "integer", "choose", "ipm"]
    assert [run.kind for run in runs.seen] == kinds
    assert [run.began_s for run in runs.seen] == [3.0 * k for k in range(8)]
    assert holds(runs)


def test_the_run_that_follows_another_within_one_call_has_what_is_left(
    fake: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interior point method where the simplex method takes too many steps, and the integer
    program that is run again without presolve where HiGHS failed."""
    runs = watch_runs(monkeypatch, fake, each_s=600.0)
    highs = Highs(clock=Clock(LIMIT_S))
    highs.relax(knapsack(20), patience=1)
    assert [run.kind for run in runs.seen] == ["choose", "ipm"]
    assert holds(runs)
    fake.now_s, runs.seen = 0.0, []
    read = adapter._read
    outcomes = iter([Outcome.FAILED, None])

    def failing(highs: highspy.Highs, is_integer: bool) -> adapter.Answer:
        outcome = next(outcomes)
        answer = read(highs, is_integer)
        return answer if outcome is None else replace(answer, outcome=outcome)

    monkeypatch.setattr(adapter, "_read", failing)
    assert highs.solve_integer().outcome is Outcome.OPTIMAL
    assert [run.allowed_s for run in runs.seen] == [1000.0, 400.0]


def test_no_run_has_any_time_once_the_limit_is_reached(
    fake: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = watch_runs(monkeypatch, fake, each_s=LIMIT_S)
    highs = Highs(clock=Clock(LIMIT_S))
    assert highs.relax(knapsack()).outcome is Outcome.OPTIMAL
    assert highs.solve_integer().outcome is Outcome.LIMIT
    assert highs.solve_relaxed().outcome is Outcome.LIMIT
    assert holds(runs)


def test_a_program_without_integer_columns_is_a_linear_one(
    fake: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a run of it as an integer program is asked for, and after one with such columns."""
    runs = watch_runs(monkeypatch, fake, each_s=1.0)
    plain = pulp.LpProblem("plain", pulp.LpMinimize)
    x = plain.add_variable("x0", 0, 1)
    plain.setObjective(pulp.lpSum([x]))
    plain.addConstraint(pulp.lpSum([x]) >= 0.5, "r0")
    highs = Highs(clock=Clock(LIMIT_S))
    highs.relax(knapsack(20))
    highs.solve_integer()
    for answer in (highs.relax(as_arrays(plain)), highs.solve_integer()):
        assert answer.objective == answer.bound == 0.5
    assert holds(runs)


def tight() -> Problem:
    """Memory binds: dives, branch and bound, and ties that are broken by another program."""
    return replace(transformer(1, (8, 8)), usage_limit=1_500_000_000)


def conflicting() -> Problem:
    """No plan: the smallest memory that would do is an integer program's answer."""
    return problem(
        [[0, 0], [0, 0]],
        usages=[[10, 90], [10, 70]],
        edges=[edge(0, 1, [[FORBIDDEN, 0], [0, FORBIDDEN]])],
        limit=30,
    )


@pytest.mark.parametrize("each_s", [1e-3, 90.0, 700.0])
@pytest.mark.parametrize("stated", [tight, conflicting])
def test_a_solve_hands_out_no_more_than_its_limit(
    stated: Callable[[], Problem],
    each_s: float,
    fake: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = watch_runs(monkeypatch, fake, each_s)
    with patch.object(tiebreak, "MAX_OPEN", 10**9):
        solution = solve(stated(), time_limit_s=LIMIT_S)
    assert holds(runs)
    if each_s < 1.0:
        assert {"choose", "integer"} <= runs.kinds
        assert solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
    # The run in which the time is up, and two at the most that HiGHS ends before they begin.
    assert sum(run.began_s >= LIMIT_S for run in runs.seen) <= 2


def test_column_generation_hands_out_no_more_than_its_limit(
    fake: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MAX_CHOICES", -1)
    monkeypatch.setattr(path, "_FIRST_CHOICES", 40)
    monkeypatch.setattr(path, "_MORE_CHOICES", 40)
    stated = transformer(1, (4, 4), memory_limit=6_200_000_000)
    runs = watch_runs(monkeypatch, fake, each_s=1e-3)
    whole = solve(stated, time_limit_s=LIMIT_S)
    assert holds(runs) and len(runs.seen) > 3
    fake.now_s, runs.seen, runs.each_s = 0.0, [], 400.0
    rushed = solve(stated, time_limit_s=LIMIT_S)
    assert holds(runs)
    assert len(runs.seen) <= 5
    assert rushed.bound <= whole.objective <= rushed.objective or not rushed.choice
    assert np.isfinite(rushed.bound)


def test_a_conflict_is_explained_without_any_time(
    fake: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a plan that is known, and is HiGHS's incumbent where it has time for no other."""
    stated = transformer(1, (4, 4), memory_limit=1_000_000)
    exactly, _ = explain_conflict(stated, Clock(None))
    assert exactly is not None
    hurried, reason = explain_conflict(stated, Clock(0.0))
    assert hurried is not None and hurried.needed >= exactly.needed
    assert reason.startswith("the smallest-memory plan found in time needs")
    runs = watch_runs(monkeypatch, fake, each_s=LIMIT_S / 2)
    halfway, reason = explain_conflict(stated, Clock(LIMIT_S))
    assert [run.kind for run in runs.seen] == ["choose", "choose", "integer"]
    assert holds(runs)
    assert halfway is not None and exactly.needed <= halfway.needed <= hurried.needed
    assert reason.startswith("the smallest-memory plan found in time needs")
