"""What the solver promises besides the optimum: truthful status, bound, reasons; same bytes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.problem import FORBIDDEN, IntArray, Problem, Status
from autopar.solver import evaluate, solve, tiebreak
from autopar.solver.clock import Clock
from autopar.solver.driver import in_canonical_order
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from autopar.solver.ilp import build_model
from autopar.solver.paths import forbid_above
from autopar.solver.relaxation import dual_bound, least_cost
from tests.solver.bruteforce import solve_by_enumeration
from tests.solver.making import edge, flow, problem
from tests.solver.random_problems import chained_problems, problems, windowed_problems
from tests.solver.synthetic import transformer

HERE = Path(__file__).parent
FEW = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def contest_example() -> Problem:
    """The example of the public contest, `google/iopddl` (Apache-2.0)."""
    stated = json.loads((HERE / "iopddl_example.json").read_text())["problem"]
    counts = [len(costs) for costs in stated["nodes"]["costs"]]
    return problem(
        stated["nodes"]["costs"],
        usages=stated["nodes"]["usages"],
        intervals=[tuple(span) for span in stated["nodes"]["intervals"]],
        edges=[
            edge(a, b, np.reshape(cost, (counts[a], counts[b])).tolist())
            for (a, b), cost in zip(stated["edges"]["nodes"], stated["edges"]["costs"], strict=True)
        ],
        limit=stated["usage_limit"],
    )


def test_the_contest_example() -> None:
    solution = solve(contest_example())
    assert solution.status is Status.OPTIMAL
    assert solution.choice == (0, 0, 2, 1, 0)
    assert solution.objective == solution.bound == 445
    assert solution_is_true(contest_example(), solution.choice, solution.objective)


def solution_is_true(stated: Problem, choice: tuple[int, ...], objective: int) -> bool:
    found = evaluate(stated, choice)
    return found.feasible and found.objective == objective


def test_a_transformer_on_two_axes_with_little_memory() -> None:
    roomy = transformer(1, (8, 8))
    free = solve(roomy)
    tight = replace(roomy, usage_limit=1_500_000_000)
    told: list[str] = []
    solution = solve(tight, progress=told.append)
    assert free.status is solution.status is Status.OPTIMAL
    assert solution.objective == solution.bound > free.objective
    assert solution_is_true(tight, solution.choice, solution.objective)
    assert solution.statistics["ties"] == "broken beside memory"
    assert any("plan of cost" in line for line in told)
    with patch.object(tiebreak, "MAX_OPEN", 10**9):
        settled = solve(tight)
    assert settled.statistics["ties"] == "broken"
    assert settled.objective == solution.objective


@pytest.mark.breadth(3)
@pytest.mark.parametrize("time_limit_s", [0.0, 0.05, 0.5])
def test_out_of_time_is_never_called_optimal_without_proof(time_limit_s: float) -> None:
    stated = transformer(1, (4, 4), memory_limit=6_200_000_000)
    optimum = solve(stated).objective
    solution = solve(stated, time_limit_s=time_limit_s)
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert solution.bound <= optimum <= solution.objective
    assert solution_is_true(stated, solution.choice, solution.objective)
    assert (solution.status is Status.OPTIMAL) == (solution.bound == solution.objective)


def test_no_time_is_not_enough_to_call_a_problem_infeasible() -> None:
    """Two choices per node, of which only alternating ones fit: descent finds none of them."""
    clash = [[FORBIDDEN, 0], [0, FORBIDDEN]]
    ring = [edge(i, (i + 1) % 5, clash) for i in range(5)]
    assert solve(problem([[0, 0]] * 5, edges=ring)).status is Status.INFEASIBLE
    rushed = solve(problem([[0, 0]] * 5, edges=ring), time_limit_s=0.0)
    assert rushed.status in (Status.LIMIT, Status.INFEASIBLE)
    assert rushed.choice == ()


def test_memory_that_cannot_be_met_is_explained() -> None:
    stated = problem(
        [[0, 9], [0, 9], [0]],
        usages=[[50, 20], [40, 30], [7]],
        intervals=[(0, 5), (3, 9), (6, 7)],
        limit=49,
    )
    solution = solve(stated)
    assert solution.status is Status.INFEASIBLE
    assert solution.conflict is not None
    assert (solution.conflict.time, solution.conflict.needed) == (3, 50)
    assert solution.conflict.largest == (("node1", 30), ("node0", 20))
    assert solve(replace(stated, usage_limit=50)).status is Status.OPTIMAL


def test_the_smallest_memory_that_would_do_when_choices_depend_on_each_other() -> None:
    """Either node alone could be small, both together may not."""
    stated = problem(
        [[0, 0], [0, 0]],
        usages=[[10, 90], [10, 70]],
        edges=[edge(0, 1, [[FORBIDDEN, 0], [0, FORBIDDEN]])],
        limit=30,
    )
    solution = solve(stated)
    assert solution.conflict is not None
    assert solution.conflict.needed == 80
    assert solve(replace(stated, usage_limit=80)).status is Status.OPTIMAL


def test_choices_that_exclude_each_other_are_the_reason() -> None:
    solution = solve(problem([[0], [0]], edges=[edge(0, 1, [[FORBIDDEN]])], limit=5))
    assert solution.status is Status.INFEASIBLE
    assert solution.conflict is None
    reason = str(solution.statistics["reason"])
    assert "no combination of choices" in reason
    assert "left to node0" in reason and "node1" in reason
    alone = solve(problem([[FORBIDDEN, FORBIDDEN], [0]]))
    assert "node0" in str(alone.statistics["reason"])


def test_one_byte_too_many_is_too_many() -> None:
    """The rows of the program are floating point: what they let pass is cut off exactly."""
    big = 2**40
    stated = problem(
        [[0, 9], [0, 6], [0, 7]],
        usages=[[big + 1, 0], [big, 0], [big, 0]],
        limit=2 * big,
    )
    solution = solve(stated)
    assert solution.status is Status.OPTIMAL
    assert (solution.objective, solution.choice) == (9, (1, 0, 0))


def test_arcs_shared_in_halves_are_made_whole() -> None:
    """A directed Steiner problem whose relaxation costs 15 and whose optimum is 20."""
    ways = {4: (1, 2), 5: (2, 3), 6: (1, 3)}
    arcs = [(0, way, 10) for way in ways]
    arcs += [(way, state, 0) for way, states in ways.items() for state in states]
    halves = flow(0, [0], [(1, [1]), (2, [2]), (3, [3])], arcs, 7)
    solution = solve(problem([[0], [0], [0], [0]], flows=[halves]))
    assert solution.status is Status.OPTIMAL
    assert solution.objective == solution.bound == 20
    assert len(solution.arcs[0]) == 5


def test_a_plan_that_only_halves_make_look_cheap_is_not_taken() -> None:
    """As above, with a way out that costs more than the relaxation and less than the truth."""
    ways = {4: (1, 2), 5: (2, 3), 6: (1, 3)}
    arcs = [(0, way, 10) for way in ways]
    arcs += [(way, state, 0) for way, states in ways.items() for state in states]
    arcs += [(7, state, 0) for state in (1, 2, 3)]
    halves = flow(0, [0, 7], [(1, [1]), (2, [2]), (3, [3])], arcs, 8)
    solution = solve(problem([[0, 17], [0], [0], [0]], flows=[halves]))
    assert (solution.status, solution.objective, solution.choice[0]) == (Status.OPTIMAL, 17, 1)


@FEW
@given(problems())
def test_very_large_costs_that_stand_for_not_allowed(stated: Problem) -> None:
    """They must not blur the small ones; where they cannot be avoided, no proof is claimed."""
    huge = 10**18

    def allowed(costs: IntArray) -> IntArray:
        return np.where(costs >= FORBIDDEN, huge, costs)

    stated = replace(
        stated,
        costs=tuple(allowed(costs) for costs in stated.costs),
        edges=tuple(replace(e, cost=allowed(e.cost)) for e in stated.edges),
        flows=tuple(replace(f, costs=allowed(f.costs)) for f in stated.flows),
    )
    best = solve_by_enumeration(stated)
    solution = solve(stated)
    if best.objective is None:
        assert solution.status is Status.INFEASIBLE
    elif best.objective < huge:
        assert (solution.status, solution.objective) == (Status.OPTIMAL, best.objective)
    else:
        assert solution.bound <= best.objective <= solution.objective


def test_a_choice_that_asks_for_nothing_is_not_beaten_by_one_that_does() -> None:
    asks = flow(0, [0], [(1, [-1, 1])], [(0, 1, 10)], 2)
    assert solve(problem([[0], [1, 0]], flows=[asks])).objective == 1
    makes = flow(0, [1, -1], [(1, [-1, 0])], [(1, 0, 10)], 2)
    assert solve(problem([[5, 0], [20, 0]], flows=[makes])).objective == 15


def test_multipliers_of_zero_prove_what_the_nodes_cost_at_the_least() -> None:
    stated = problem([[5, 7], [3, 9]], edges=[edge(0, 1, [[0, 1], [2, 3]])])
    model = build_model(stated)
    assert dual_bound(model, np.zeros(model.num_rows)).value == pytest.approx(8)


@FEW
@given(problems(), st.data())
def test_any_multipliers_prove_a_bound(stated: Problem, data: st.DataObject) -> None:
    best = solve_by_enumeration(stated)
    if any((costs >= FORBIDDEN).all() for costs in stated.costs) or best.objective is None:
        return
    model = build_model(stated)
    largest = int(model.cost.max()) + 1
    duals = data.draw(
        st.lists(st.integers(-3, 3), min_size=model.num_rows, max_size=model.num_rows)
    )
    found = dual_bound(model, np.array(duals) * (largest / 3))
    assert found.value <= best.objective
    assert least_cost(model) <= best.objective


@FEW
@given(problems() | chained_problems() | windowed_problems())
def test_an_order_keeps_the_answer(stated: Problem) -> None:
    ordered, lift = in_canonical_order(stated)
    here, there = solve_by_enumeration(stated), solve_by_enumeration(ordered)
    assert here.objective == there.objective
    assert {lift(choice) for choice in there.choices} == {*here.choices}
    if here.choices:
        assert here.lowest_tie_weight(stated) == there.lowest_tie_weight(ordered)


@FEW
@given(problems())
def test_what_a_plan_in_hand_excludes_is_in_no_better_plan(stated: Problem) -> None:
    best = solve_by_enumeration(stated)
    if best.objective is None:
        return
    assert solve_by_enumeration(forbid_above(stated, best.objective)).choices == best.choices


@FEW
@given(problems())
def test_descent_is_feasible_and_never_too_good(stated: Problem) -> None:
    best = solve_by_enumeration(stated)
    descent = Descent(stated, Evaluator(stated), Clock(None))
    for start in (descent.grown(), descent.smallest_memory()):
        found = descent.improve(start)
        if found is not None:
            choice, evaluation = found
            assert best.objective is not None
            assert solution_is_true(stated, choice, evaluation.objective)
            assert evaluation.objective >= best.objective


@pytest.mark.nightly
def test_the_same_bytes_whatever_the_hash_seed() -> None:
    script = (
        "from autopar.solver import solve\n"
        "from tests.solver.synthetic import transformer\n"
        "found = solve(transformer(1, (2, 4), memory_limit=12_000_000_000))\n"
        "print(found.status, found.objective, found.choice, found.arcs)"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            cwd=HERE.parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(answers) == 1
    assert answers.pop().startswith("optimal")


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (problem([[0], [0]], edges=[edge(0, 1, [[0, 0]])]), "shape"),
        (problem([[0], [0]], flows=[flow(0, [0], [(1, [2])], [], 2)]), "does not have"),
        (problem([[0], [0]], flows=[flow(0, [0], [(1, [0, 0])], [], 2)]), "a state per choice"),
        (problem([[0], [0]], flows=[flow(0, [0], [(1, [1])], [(0, 1, -1)], 2)]), "out of range"),
    ],
)
def test_a_malformed_problem_is_refused(stated: Problem, words: str) -> None:
    with pytest.raises(SolverError, match=words):
        solve(stated)
