"""Windows: what hides behind what, against exhaustive enumeration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.ir.problem import FORBIDDEN, Problem, Saving, Status, Window
from autopar.solver import driver, evaluate, exact, solve
from autopar.solver.clock import Clock
from autopar.solver.column_generation import path
from autopar.solver.column_generation.path import quick_bound
from autopar.solver.exact import WINDOWED_TOLERANCE
from autopar.solver.sensitivity import Sensitivity
from autopar.solver.windows import normalised, weighed
from tests.solver.bruteforce import cost_of, flow_tables, solve_by_enumeration
from tests.solver.making import flow, ints, problem
from tests.solver.random_problems import windowed_problems
from tests.solver.synthetic import transformer

SETTINGS = settings(max_examples=150, deadline=None)


@SETTINGS
@given(windowed_problems())
def test_the_plan_is_the_best_and_the_bound_below_all(stated: Problem) -> None:
    best = solve_by_enumeration(stated)
    solution = solve(stated)
    if best.objective is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.bound <= best.objective <= solution.objective
    cost = cost_of(stated, solution.choice, flow_tables(stated))
    assert cost is not None and cost <= solution.objective
    if solution.status is Status.OPTIMAL:
        assert solution.objective == best.objective
    if len(stated.flows) < 2:
        # One tensor alone takes the best of its ways; of several, each in turn does.
        assert solution.objective <= best.objective * (1 + WINDOWED_TOLERANCE) + 1


@SETTINGS
@given(windowed_problems(), st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_any_shares_give_a_bound(stated: Problem, parts: list[float]) -> None:
    best = solve_by_enumeration(stated)
    if best.objective is None:
        return
    ends = np.cumsum([len(window.savings) for window in stated.windows])
    shares = normalised(np.split(np.array(parts[: int(ends[-1])]), ends[:-1]))
    least = solve_by_enumeration(weighed(stated, shares)).objective
    assert least is not None and least <= best.objective
    assert quick_bound(stated, Clock(None)) <= best.objective


@settings(max_examples=60, deadline=None)
@given(windowed_problems(), st.data())
def test_what_is_said_of_fewer_choices_is_below_all_of_them(
    stated: Problem, data: st.DataObject
) -> None:
    if solve_by_enumeration(stated).objective is None:
        return
    node = data.draw(st.integers(0, len(stated.costs) - 1))
    count = len(stated.costs[node])
    left = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    found = Sensitivity(stated).with_only({node: left}) if left.any() else None
    costs = list(stated.costs)
    costs[node] = np.where(left, costs[node], FORBIDDEN)
    best = solve_by_enumeration(replace(stated, costs=tuple(costs))).objective
    if found is not None and best is not None:
        assert found.bound <= best
        assert found.solution is None or found.solution.objective >= best


def overlap(savings: dict[str, tuple[dict[int, list[int]], dict[int, list[int]]]]) -> Window:
    return Window(
        "window",
        tuple(
            Saving(
                resource,
                {i: ints(x) for i, x in nodes.items()},
                {f: ints(x) for f, x in flows.items()},
            )
            for resource, (nodes, flows) in savings.items()
        ),
    )


def test_what_hides_costs_nothing_and_no_more_of_it_hides_than_there_is_to_hide_behind() -> None:
    """A node that computes 10, or 14 and sends 4 less; what it sends hides behind what it
    computes."""
    send = flow(0, [0, 1], [(1, [2])], [(0, 2, 20), (1, 2, 9)], 3)
    stated = problem([[10, 14], [0]], flows=[send])
    assert solve(stated).objective == 23
    window = overlap({"device": ({}, {0: [20, 9]}), "x": ({0: [10, 14]}, {})})
    found = solve(replace(stated, windows=(window,)))
    assert (found.choice, found.objective) == ((1, 0), 14)
    assert evaluate(replace(stated, windows=(window,)), (0, 0)).objective == 20


def test_of_equally_fast_ways_tensors_take_those_that_use_all_links() -> None:
    """Two tensors, each over x and then y or the other way round: together they hide behind each
    other if they do not do the same. Links that carry nothing are in nobody's way, and what is
    forbidden is no way."""
    arcs = [(0, 1, 8), (1, 3, 2), (0, 2, 2), (2, 3, 8), (0, 3, FORBIDDEN)]
    over_x, over_y, over_any = [8, 0, 2, 0, 0], [0, 2, 0, 8, 0], [8, 2, 2, 8, 0]
    flows = [flow(0, [0], [(1, [3])], arcs, 4), flow(1, [0], [(0, [3])], arcs, 4)]
    stated = problem([[0], [0]], flows=flows)
    carried = {"x": over_y, "y": over_x, **dict.fromkeys(("a", "b", "c", "d"), over_any)}
    window = overlap({link: ({}, {0: saved, 1: saved}) for link, saved in carried.items()})
    found = solve(replace(stated, windows=(window,)))
    assert found.objective == 10
    assert found.arcs in (((0, 1), (2, 3)), ((2, 3), (0, 1)))


def test_a_slow_way_that_is_hidden_is_no_way() -> None:
    """The direct arc takes 10 and is hidden whole, but tensors go over state 2, which takes 4."""
    send = flow(0, [0], [(1, [1])], [(0, 1, 10), (0, 2, 2), (2, 1, 2)], 3)
    stated = problem([[0], [0]], flows=[send])
    window = overlap({"device": ({}, {0: [10, 0, 0]})})
    windowed = replace(stated, windows=(window,))
    assert quick_bound(windowed, Clock(None)) == evaluate(windowed, (0, 0)).objective == 4


def test_a_plan_far_from_the_bound_is_kept_where_all_plans_near_it_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each of many windows half of one choice hides behind half of the other, in the relaxation
    alone: a large program is not searched to its end, and the plan has its gap."""
    count = 450
    pairs = [overlap({"device": ({k: [30, 0]}, {}), "x": ({k: [0, 30]}, {})}) for k in range(count)]
    windows = tuple(replace(window, key=f"window{k}") for k, window in enumerate(pairs))
    stated = replace(problem([[30, 30]] * count), windows=windows)
    assert solve(stated).status is Status.OPTIMAL
    monkeypatch.setattr(exact, "_MAX_WINDOWED", 0)
    found = solve(stated)
    assert (found.status, found.objective) == (Status.FEASIBLE, 30 * count)
    assert 15 * count <= found.bound < 16 * count


@pytest.mark.parametrize(("part", "is_rough"), [(0.001, False), (0.02, True), (0.1, False)])
def test_a_rough_plan_is_the_first_that_is_near_the_bound(
    monkeypatch: pytest.MonkeyPatch, part: float, is_rough: bool
) -> None:
    """Of the pairs as above and a node that costs so much that they are such a part of all: of few
    columns, at the bound or far from it, there is more to be looked for."""
    count = 50
    pairs = [overlap({"device": ({k: [30, 0]}, {}), "x": ({k: [0, 30]}, {})}) for k in range(count)]
    windows = tuple(replace(window, key=f"window{k}") for k, window in enumerate(pairs))
    rest = int(15 * count / part)
    stated = replace(problem([[30, 30]] * count + [[rest]]), windows=windows)
    assert not solve(stated, rough=True).is_rough
    monkeypatch.setattr(exact, "_MAX_WINDOWED", 0)
    found = solve(stated, rough=True)
    assert found.is_rough == is_rough and found.objective == 30 * count + rest
    assert not solve(stated).is_rough


@settings(max_examples=40, deadline=None)
@given(windowed_problems())
def test_bounds_hold_where_large_programs_are_not_searched_to_their_end(stated: Problem) -> None:
    best = solve_by_enumeration(stated)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_MAX_WINDOWED", -1)
        solution = solve(stated)
    if best.objective is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.bound <= best.objective <= solution.objective


FAILS = replace(
    problem(
        [[0, 0, 0], [3, 3, 3]],
        flows=[
            flow(
                1,
                [-1, 0, 0],
                [(0, [0, 0, -1]), (0, [-1, 0, 1])],
                [(0, 0, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)],
                2,
            )
        ],
    ),
    windows=(Window("window0", (Saving("device", {}, {}), Saving("x", {}, {}))),),
)
"""On a master of this, HiGHS's interior point method says that there was an error."""


@SETTINGS
@given(windowed_problems(), st.sampled_from([0.0, 0.02, 0.2]), st.booleans())
@example(FAILS, 0.0, False)
def test_column_generation_says_no_more_than_is_so(
    stated: Problem, tolerance: float, rough: bool
) -> None:
    """Where the whole is not looked at, the bound is below all plans nevertheless."""
    best = solve_by_enumeration(stated)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "MAX_CHOICES", -1)
        patch.setattr(driver, "_FEW_CHOICES", -1)
        patch.setattr(path, "_FIRST_CHOICES", 2)
        patch.setattr(path, "_MORE_CHOICES", 2)
        patch.setattr(path, "_FEW_CHOICES", 3)
        patch.setattr(path, "_FEW_WHEN_COARSE", 3)
        patch.setattr(path, "_VERY_FEW", 3)
        solution = solve(stated, tolerance=tolerance, rough=rough)
    if best.objective is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.bound <= best.objective <= solution.objective
    assert evaluate(stated, solution.choice).objective == solution.objective


@pytest.mark.parametrize(("few", "is_rough"), [(0, True), (100, False)])
def test_a_rough_search_ends_with_a_master_that_has_no_better_plan(
    monkeypatch: pytest.MonkeyPatch, few: int, is_rough: bool
) -> None:
    """If many choices are left. What a larger master would have proven stays open."""
    stated = problem([[0, 0], [0], [0, 0, 0], [4, 4, 4]])
    window = overlap({"device": ({3: [0, 0, 1]}, {}), "x": ({}, {})})
    stated = replace(stated, windows=(window,))
    for module, name, value in (
        *((driver, name, -1) for name in ("MAX_CHOICES", "_FEW_CHOICES")),
        *((path, name, 2) for name in ("_FIRST_CHOICES", "_MORE_CHOICES")),
        *((path, name, few) for name in ("_FEW_CHOICES", "_FEW_WHEN_COARSE", "_VERY_FEW")),
    ):
        monkeypatch.setattr(module, name, value)
    found, whole = solve(stated, rough=True), solve(stated)
    assert found.is_rough == is_rough and not whole.is_rough
    assert found.objective == whole.objective == whole.bound == 4
    assert (found.bound < 4) == is_rough


def test_a_plan_that_is_near_enough_takes_no_look_at_all_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stated = transformer(1, (4,))
    nothing = overlap({"device": ({0: [0] * len(stated.costs[0])}, {})})
    stated = replace(stated, windows=(nothing,))
    exactly = solve(stated)
    monkeypatch.setattr(driver, "_FEW_CHOICES", 0)
    coarsely = solve(stated, tolerance=0.05)
    assert coarsely.bound <= exactly.objective <= coarsely.objective
    assert coarsely.objective - coarsely.bound <= 0.05 * coarsely.objective
    assert int(coarsely.statistics["variables"]) < int(exactly.statistics["variables"])


@pytest.mark.parametrize(
    ("gap", "distance", "is_enough"), [(4, 1, True), (8, 3, False), (8, 12, True), (12, 12, False)]
)
def test_in_a_large_problem_a_gap_within_what_was_searched_is_enough(
    gap: float, distance: float, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bound of 1,000 distances of 2.5, 10 and 40 are searched, until the best plan is within
    one. A gap of 5 is enough in any case."""
    state: Any = SimpleNamespace(
        is_finished=False, evaluation=True, gap=gap, clock=SimpleNamespace(expired=False)
    )
    duals: Any = SimpleNamespace(value=1000.0)
    highs: Any = SimpleNamespace(free=lambda: None)
    monkeypatch.setattr(exact, "_num_open", lambda *_: exact._MAX_WINDOWED + 1)
    monkeypatch.setattr(exact, "_room", lambda *_: distance)
    monkeypatch.setattr(exact, "_solve_integer", lambda *_: False)
    assert exact._narrow(state, cast(Any, None), highs, duals, exact.EXACT) is is_enough
