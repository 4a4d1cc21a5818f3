"""What is said of plans below a cutoff, and of what memory keeps from being better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.ir.problem import Problem, Saving, Status, Window
from autopar.solver import solve
from autopar.solver.exact import WINDOWED_TOLERANCE
from tests.solver.making import edge, flow, ints, problem
from tests.solver.random_problems import problems, windowed_problems
from tests.solver.test_exact import FEW, SETTINGS

TENSOR = flow(
    0,
    [2, 0],
    [(0, [0, 2])],
    [(2, 0, 42), (0, 2, 49), (0, 1, 49), (1, 2, 21), (1, 0, 14)],
    3,
)
HIDES_LITTLE = replace(
    problem([[28, 0]], usages=[[1, 4]], flows=[TENSOR], limit=6),
    windows=(
        Window(
            "window0",
            (
                Saving("device", {}, {0: ints([12, 4, 0, 10, 4])}),
                Saving("x", {0: ints([5, 0])}, {0: ints([4, 2, 22, 0, 0])}),
                Saving("y", {}, {0: ints([12, 12, 19, 8, 5])}),
            ),
        ),
        Window("window1", (Saving("device", {}, {}), Saving("x", {0: ints([0, 0])}, {}))),
    ),
)
"""The relaxation hides nothing, at a price; the best plan hides a part that is worth less."""

APART = [[20, 0], [0, 10]]
FRUSTRATED = problem(
    [[0, 0], [0, 0], [0, 0]],
    usages=[[0, 2], [0, 2], [0, 2]],
    edges=[edge(0, 1, APART), edge(1, 2, APART), edge(0, 2, APART)],
    limit=3,
)
"""The relaxation takes half of everything, which fits, for nothing."""


ANY_CUTOFF = given(st.one_of(problems(), windowed_problems()), st.integers(0, 60))


@FEW
@ANY_CUTOFF
@example(HIDES_LITTLE, 48)
@example(FRUSTRATED, 15)
def test_no_plan_is_below_the_bound_of_what_is_beaten(stated: Problem, cutoff: int) -> None:
    check_cutoff(stated, cutoff)


@pytest.mark.nightly
@SETTINGS
@ANY_CUTOFF
def test_no_bound_of_what_is_beaten_is_above_a_plan(stated: Problem, cutoff: int) -> None:
    check_cutoff(stated, cutoff)


def check_cutoff(stated: Problem, cutoff: int) -> None:
    """From the start and from where other relaxations ended; and without memory to bind where that
    is not limiting."""
    free, best = solve(replace(stated, usage_limit=None)), solve(stated)
    if not best.choice:
        return
    tolerance = 1 + (WINDOWED_TOLERANCE if stated.windows else 0.0)
    if not best.is_limiting:
        assert best.objective <= free.objective * tolerance
    for start in (None, free.basis, best.basis):
        found = solve(stated, cutoff=cutoff, start=start)
        if found.status is Status.BEATEN:
            assert cutoff <= found.bound <= best.objective * tolerance
            if not found.is_limiting:
                assert found.bound <= free.objective * tolerance
        else:
            assert found.objective <= best.objective * tolerance
