"""Message passing within a limit of time, by a clock that work moves: used, and not passed."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, current_thread, main_thread
from typing import Any

import pytest

from autopar.ir.problem import Status
from autopar.solver import driver, solve
from autopar.solver.message_passing import path, plans
from autopar.solver.message_passing.ascent import Ascent
from autopar.solver.message_passing.plans import Improver, Planner
from autopar.solver.pairwise.bound import Guide

from .fake_clock import FakeClock, fake_clock
from .test_message_passing import ladder


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rounds, and message passing for problems of any size."""
    monkeypatch.setattr(path, "_STEPS", 20)
    monkeypatch.setattr(path, "_ROUNDS", 5)
    monkeypatch.setattr(plans, "_TRIALS", 5)
    monkeypatch.setattr(driver, "MAX_ENTRIES", -1)


def count_work(monkeypatch: pytest.MonkeyPatch, fake: FakeClock) -> list[float]:
    """When each piece of work began, by the fake clock: it takes a second, of whichever thread."""
    began: list[float] = []
    lock = Lock()

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                began.append(fake.now_s)
                fake.now_s += 1.0
            return work(*args, **kwargs)

        return run

    monkeypatch.setattr(Ascent, "advance", timed(Ascent.advance))
    monkeypatch.setattr(Planner, "dive", timed(Planner.dive))
    monkeypatch.setattr(Planner, "walk", timed(Planner.walk))
    return began


def test_time_that_is_given_is_used_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of time the number of rounds is the limit; with it they go on until it is
    reached. What is begun then is what belongs to the dives of both threads."""
    monkeypatch.setattr(path, "_ROUNDS", 2)
    problem = ladder(60, 5, 5, limit=40)
    fake = fake_clock(monkeypatch)
    began = count_work(monkeypatch, fake)
    short = solve(problem)
    assert short.status is Status.FEASIBLE
    assert short.statistics["rounds"] == 2
    limit_s = 10.0 * len(began)
    fake.now_s = 0.0
    began.clear()
    long = solve(problem, time_limit_s=limit_s)
    assert int(long.statistics["rounds"]) > 10
    assert long.objective <= short.objective
    assert len(began) >= limit_s
    assert sum(at >= limit_s for at in began) <= 2 * len(plans._TREES)


def test_no_time_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    began = count_work(monkeypatch, fake_clock(monkeypatch))
    solution = solve(ladder(60, 5, 5, limit=40), time_limit_s=0.0)
    assert solution.status is Status.LIMIT
    assert not began


def test_plans_are_changed_while_the_bound_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of time; without one what is done does not depend on which thread is faster."""
    changes: list[int] = []
    advance, improve_more = Ascent.advance, Improver.improve_more
    fake, has_changed = fake_clock(monkeypatch), Event()

    def slowly(self: Ascent) -> None:
        if is_limited and current_thread() is not main_thread():
            has_changed.wait()
        fake.now_s += 1.0
        advance(self)

    def noted(self: Improver, guide: Guide) -> None:
        improve_more(self, guide)
        changes.append(self.seed)
        has_changed.set()

    monkeypatch.setattr(Ascent, "advance", slowly)
    monkeypatch.setattr(Improver, "improve_more", noted)
    problem = ladder(60, 5, 5, limit=40)
    monkeypatch.setattr(path, "_ROUNDS", 2)
    is_limited = False
    solve(problem)
    assert not changes
    is_limited = True
    solve(problem, time_limit_s=200.0)
    assert set(changes) == {0}


def test_a_limit_ends_rounds_early(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ladder(60, 5, 5, limit=40)
    whole = solve(problem)
    count_work(monkeypatch, fake_clock(monkeypatch))
    limited = solve(problem, time_limit_s=60.0)
    assert limited.bound <= whole.objective
    assert int(limited.statistics["rounds"]) < int(whole.statistics["rounds"])
