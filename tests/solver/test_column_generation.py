"""Column generation against the oracle: optimal plans, and bounds that hold for every choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import FORBIDDEN, Problem, Status
from autopar.solver import driver, evaluate, exact, solve
from autopar.solver.clock import Clock
from autopar.solver.column_generation import path
from autopar.solver.column_generation.passing import Passing
from autopar.solver.column_generation.path import near
from autopar.solver.column_generation.relays import no_potentials, relay
from autopar.solver.driver import in_canonical_order
from autopar.solver.exact import find_exactly
from autopar.solver.ilp import distinct_sinks
from autopar.solver.memory import maximal_times
from autopar.solver.routing import all_distances
from autopar.solver.search import silent

from .bruteforce import solve_by_enumeration
from .making import edge, flow, problem
from .random_problems import problems
from .synthetic import transformer

SETTINGS = settings(max_examples=150, deadline=None)


@pytest.fixture(autouse=True)
def small_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column generation for problems of any size, with masters that have to grow."""
    monkeypatch.setattr(driver, "MAX_CHOICES", -1)
    monkeypatch.setattr(path, "_FIRST_CHOICES", 2)
    monkeypatch.setattr(path, "_MORE_CHOICES", 2)
    monkeypatch.setattr(path, "_FEW_CHOICES", 3)
    monkeypatch.setattr(path, "_VERY_FEW", 3)


WAYS = {"rounds": {}, "many nodes": {"_MANY_NODES": 0}, "far from the bound": {"_FAR": -1.0}}


@SETTINGS
@given(problems(), st.sampled_from(sorted(WAYS)))
def test_answers_hold(stated: Problem, way: str) -> None:
    """In rounds, until some bring nothing; as far as a problem of very many nodes is solved; and
    with what is left solved as a whole after two rounds."""
    best = solve_by_enumeration(stated)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(path, name, value)
        solution = solve(stated)
    if best.objective is None:
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.choice
    evaluation = evaluate(stated, solution.choice)
    assert evaluation.feasible
    assert solution.bound <= best.objective <= solution.objective == evaluation.objective
    num_rounds = int(solution.statistics.get("rounds", 0))
    has_given_up = way == "rounds" and num_rounds > path._PATIENCE
    if way != "many nodes" and not has_given_up:
        assert solution.objective - solution.bound <= path.TOLERANCE * solution.objective
    if solution.status is Status.OPTIMAL:
        assert solution.objective == best.objective


@SETTINGS
@given(problems(), st.integers(0, 2**32 - 1))
def test_any_prices_bound_every_choice(stated: Problem, seed: int) -> None:
    """Potentials and memory prices are made up: what is proven must hold all the same."""
    stated, _ = in_canonical_order(stated)
    draw = np.random.default_rng(seed)
    made_up = tuple(
        tuple(draw.uniform(-20, 20, len(f.states)) for _ in distinct_sinks(f)) for f in stated.flows
    )
    relayed = relay(stated, all_distances(stated.flows), made_up)
    if relayed is None:
        assert solve_by_enumeration(stated).objective is None
        return
    byte_price = float(draw.uniform(0, 2e-9))
    passing = Passing(relayed, np.full(len(maximal_times(stated)), byte_price))
    bound, at_least = passing.sweep(Clock(None), 100), passing.at_least()
    best = solve_by_enumeration(stated)
    if best.objective is None:
        return
    assert bound <= best.objective
    for choice in best.choices:
        for node, c in enumerate(choice):
            assert at_least[node][c] <= best.objective * (1 + 1e-9) + 1e-6


def test_two_commodities_that_part_late_cost_what_they_cost() -> None:
    """From state 0 both sinks want others (2 and 3), which state 1 is near to."""
    shared = flow(
        0, [0], [(1, [2]), (2, [3])], [(0, 1, 10), (1, 2, 1), (1, 3, 1), (0, 2, 10), (0, 3, 10)], 4
    )
    stated = problem([[0], [0], [0]], flows=[shared])
    relayed = relay(stated, all_distances(stated.flows), no_potentials(stated))
    assert relayed is not None
    assert Passing(relayed, np.zeros(0)).sweep(Clock(None), 100) == 12


def test_three_commodities_share_the_cost_of_an_arc() -> None:
    shared = flow(0, [0], [(1, [1]), (2, [1]), (3, [1])], [(0, 1, 9)], 2)
    stated = problem([[0]] * 4, flows=[shared])
    relayed = relay(stated, all_distances(stated.flows), no_potentials(stated))
    assert relayed is not None
    assert Passing(relayed, np.zeros(0)).sweep(Clock(None), 100) == 9


@pytest.mark.nightly
def test_three_axes_are_solved_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the integer program on everything."""
    stated = transformer(1, (2, 2, 2))
    monkeypatch.setattr(path, "_FIRST_CHOICES", 300)
    monkeypatch.setattr(path, "_MORE_CHOICES", 300)
    monkeypatch.setattr(path, "_FEW_CHOICES", 1_000)
    generated = solve(stated)
    monkeypatch.setattr(driver, "MAX_CHOICES", 10**9)
    whole = solve(stated)
    assert generated.status is whole.status is Status.OPTIMAL
    assert generated.objective == whole.objective
    assert generated.statistics["rounds"]


def test_far_from_the_bound_rounds_go_on_while_they_make_better_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On three axes, where what is left cannot be solved as a whole."""
    monkeypatch.setattr(exact, "MAX_CHOICES", -1)
    monkeypatch.setattr(path, "_FAR", -1.0)
    stated, _ = in_canonical_order(transformer(1, (2, 2)))
    work = path._Work(stated, Clock(None), silent, float("inf"), 0.0)
    work.begin()
    costs: list[float] = [work.state.cost]
    while not work.finished():
        work.round(len(costs) - 1)
        costs.append(work.state.cost)
        assert work._is_vain == (costs[-1] >= (1 - path.TOLERANCE) * costs[-2])
    assert len(costs) > 2
    fresh = path._Work(stated, Clock(None), silent, float("inf"), 0.0)
    fresh.begin()
    monkeypatch.setattr(fresh, "_is_enough", lambda _: False)
    for is_vain in (False, True):
        fresh._is_vain = is_vain
        fresh._close_or_grow(1, 10**6)
        assert fresh._done == is_vain


def test_rounds_that_make_better_plans_than_nobody_wants_are_vain() -> None:
    stated, _ = in_canonical_order(transformer(1, (2, 2)))
    work = path._Work(stated, Clock(None), silent, 1.0, 0.0)
    work._grow(100)
    work.round(0)
    assert work._is_vain


@pytest.mark.parametrize(("hopeless", "dives"), [(0.0, False), (1.0, True)])
def test_no_dive_follows_a_relaxation_that_is_hopeless(
    hopeless: float, dives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that costs nothing, where a plan costs something."""
    apart = [[20, 0], [0, 10]]
    edges = [edge(0, 1, apart), edge(1, 2, apart), edge(0, 2, apart)]
    stated = problem([[0, 0]] * 3, usages=[[0, 2]] * 3, edges=edges, limit=3)
    dived: list[bool] = []
    monkeypatch.setattr(exact, "dive", lambda *_, **__: dived.append(True))
    find_exactly(stated, Clock(None), silent, exact.Aim(hopeless=hopeless))
    assert bool(dived) == dives


def test_choices_that_are_out_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice whose bound is above the best plan is in no plan as cheap."""
    monkeypatch.setattr(driver, "MAX_CHOICES", 10**9)
    stated = transformer(1, (4,))
    stated, _ = in_canonical_order(stated)
    relayed = relay(stated, all_distances(stated.flows), no_potentials(stated))
    assert relayed is not None
    passing = Passing(relayed, np.zeros(len(maximal_times(stated))))
    passing.sweep(Clock(None), 100)
    best = solve(stated)
    out = 0
    for node, bounds in enumerate(passing.at_least()):
        for c in np.flatnonzero(bounds > best.objective):
            costs = list(stated.costs)
            costs[node] = np.where(np.arange(len(costs[node])) == c, costs[node], FORBIDDEN)
            held = solve(replace(stated, costs=tuple(costs)))
            assert held.status is Status.INFEASIBLE or held.objective > best.objective
            out += 1
            if out > 5:
                return
    assert out


@SETTINGS
@given(problems(), st.integers(-3, 3), st.booleans())
def test_a_cutoff_beats_only_what_it_must(stated: Problem, above: int, small: bool) -> None:
    best = solve_by_enumeration(stated)
    cutoff = (best.objective or 0) + above
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "MAX_CHOICES", 10**9 if small else -1)
        solution = solve(stated, cutoff=cutoff)
    if solution.status is Status.BEATEN:
        assert best.objective is None or cutoff <= solution.bound <= best.objective
    elif best.objective is None:
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.bound <= best.objective <= solution.objective
        assert not small or above > 0 or solution.objective == best.objective


def test_a_dominated_problem_is_cut_off_early() -> None:
    stated = transformer(1, (4,))
    best = solve(stated).objective
    beaten = solve(stated, cutoff=best // 2)
    assert beaten.status is Status.BEATEN
    assert best // 2 <= beaten.bound <= best
    assert "variables" not in beaten.statistics, "no program was needed"
    assert solve(stated, cutoff=best + 1).objective == best


def test_neighbours_differ_on_one_axis() -> None:
    """States (0, 0), (0, 1), (1, 1) on two axes; the second node asks for them or for nothing."""
    states = np.array([[0, 0], [0, 1], [1, 1]])
    made = flow(0, [0, 1, 2], [(1, [0, 1, 2, -1])], [(0, 2, 1)], 3)
    laid = problem([[0] * 3, [0] * 4, [0] * 2], flows=[replace(made, placements=states)])
    assert [some.tolist() for some in near(laid, (0, 1, 1))] == [[0, 1], [0, 1, 2, 3], [1]]
    by_arcs = problem([[0] * 3, [0] * 4, [0] * 2], flows=[made])
    assert [some.tolist() for some in near(by_arcs, (0, 1, 0))] == [[0, 2], [1, 3], [0]]


def test_a_node_whose_first_choices_are_out_keeps_that_of_the_best_plan() -> None:
    """The leanest choice is known to be in no good plan before the first master is made."""
    stated = problem([[0, 1000], [0, 0]], usages=[[1, 0], [0, 0]], limit=5)
    work = path._Work(stated, Clock(None), lambda _: None, float("inf"), 0.0)
    assert [kept.tolist() for kept in work.kept] == [[1], [0]]
    work._submit_first()
    passing = path._without_prices(stated)
    assert passing is not None
    work._learn(passing, 5)
    assert [left[kept].tolist() for left, kept in zip(work.left, work.kept, strict=True)] == [
        [0],
        [0],
    ]
