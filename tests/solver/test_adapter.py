"""The adapter tells the truth, where HiGHS's own words need reading."""

from __future__ import annotations

from dataclasses import replace

import highspy
import numpy as np
import pulp
import pytest

from autopar.errors import SolverError
from autopar.solver import adapter
from autopar.solver.adapter import Highs, LinearProgram, Outcome
from autopar.solver.clock import Clock
from autopar.solver.ilp import build_model
from autopar.solver.modelling import as_arrays
from autopar.solver.relaxation import express
from tests.solver.fake_clock import fake_clock
from tests.solver.synthetic import transformer


def knapsack(size: int = 60) -> LinearProgram:
    """Items of nearly equal worth, hard to prove."""
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    take = [program.add_variable(f"x{i:04d}", 0, 1, pulp.LpInteger) for i in range(size)]
    weights = [[(i * j * 7919) % 97 + 50 for i in range(size)] for j in range(1, 13)]
    program.setObjective(pulp.lpSum(-((i * 37) % 11 + 40) * x for i, x in enumerate(take)))
    for row, weight in enumerate(weights):
        limit = pulp.lpSum(w * x for w, x in zip(weight, take, strict=True)) <= sum(weight) // 2
        program.addConstraint(limit, f"r{row}")
    return as_arrays(program)


def test_a_program_is_the_model() -> None:
    """HiGHS holds the rows and columns of the model, in its order."""
    model = build_model(replace(transformer(1, (2, 4)), usage_limit=1_500_000_000))
    highs = Highs()
    highs.relax(express(model))
    held = highs._highs.getLp()
    assert (np.array(held.col_cost_) == model.cost * model.cost_scale).all()
    assert np.array(held.row_lower_).tolist() == model.row_lower.tolist()
    assert np.array(held.row_upper_).tolist() == model.row_upper.tolist()
    matrix = np.zeros((model.num_rows, model.num_columns))
    rows = np.repeat(np.arange(model.num_rows), np.diff(model.row_starts))
    matrix[rows, model.columns] = model.values
    starts, indices, values = (
        np.array(part)
        for part in (held.a_matrix_.start_, held.a_matrix_.index_, held.a_matrix_.value_)
    )
    others = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    is_rowwise = held.a_matrix_.format_ == highspy.MatrixFormat.kRowwise
    kept = np.zeros_like(matrix)
    kept[(others, indices) if is_rowwise else (indices, others)] = values
    assert (kept == matrix).all()


def test_a_node_limit_with_an_incumbent_is_not_optimal() -> None:
    highs = Highs({"mip_max_nodes": 1})
    highs.relax(knapsack())
    answer = highs.solve_integer()
    assert answer.outcome is Outcome.LIMIT
    assert len(answer.values)
    assert answer.bound < answer.objective


def test_a_time_limit_is_not_optimal() -> None:
    highs = Highs(clock=Clock(0.0))
    assert highs.relax(knapsack()).outcome is Outcome.LIMIT
    assert highs.solve_integer().outcome is Outcome.LIMIT


def test_a_refused_option_is_an_error() -> None:
    with pytest.raises(SolverError, match="no_such_option"):
        Highs({"no_such_option": 1}).relax(knapsack())


def test_an_infeasible_program() -> None:
    program = pulp.LpProblem("none", pulp.LpMinimize)
    x = program.add_variable("x0", 0, 1)
    program.setObjective(pulp.lpSum([x]))
    program.addConstraint(pulp.lpSum([x]) >= 2, "r0")
    answer = Highs().relax(as_arrays(program))
    assert answer.outcome is Outcome.INFEASIBLE
    assert len(answer.values) == 0


def test_another_number_of_threads_in_the_same_process() -> None:
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.run()
    program = knapsack(20)
    assert Highs({"threads": 2}).relax(program).outcome is Outcome.OPTIMAL
    assert Highs().relax(program).outcome is Outcome.OPTIMAL


def test_hand_over_keeps_signs_limits_and_costs() -> None:
    program = pulp.LpProblem("small", pulp.LpMinimize)
    x = program.add_variable("x0", 0, 4)
    y = program.add_variable("x1", 0, 4)
    program.setObjective(3 * x + 2 * y)
    program.addConstraint(x + y >= 5, "r0")
    program.addConstraint(x - y <= -1, "r1")
    answer = Highs().relax(as_arrays(program))
    assert answer.objective == pytest.approx(3 * 1 + 2 * 4)
    assert answer.values.tolist() == pytest.approx([1, 4])


def test_a_relaxation_ends_once_it_costs_enough() -> None:
    highs = Highs()
    least = highs.relax(knapsack()).objective
    answer = highs.relax(knapsack(), enough=1.1 * least)
    assert answer.outcome is Outcome.LIMIT and 1.1 * least <= answer.objective < least
    assert len(answer.row_duals)
    assert highs.relax(knapsack()).objective == least


def test_what_costs_enough_is_not_looked_for() -> None:
    """It may be found without, and proves nothing then of what costs less."""
    highs = Highs()
    highs.relax(knapsack(20))
    best = highs.solve_integer()
    known = highs.solve_integer(enough=best.objective - 5)
    assert known.num_nodes < best.num_nodes / 2
    assert known.bound <= best.objective - 5
    for answer in (highs.solve_integer(enough=best.objective + 1), highs.solve_integer()):
        assert round(answer.objective) == round(answer.bound) == round(best.objective)


def chargeable() -> LinearProgram:
    """What is bought in parts, of sources that cost something once: integer columns and others,
    of which no start is optimal."""
    program = pulp.LpProblem("sources", pulp.LpMinimize)
    opened = [program.add_variable(f"a{i:02d}", 0, 1, pulp.LpInteger) for i in range(20)]
    bought = [program.add_variable(f"b{i:02d}", 0, 10) for i in range(20)]
    costs = [
        (i * 7) % 15 + 5 * a + (i % 4 + 1) * b
        for i, (a, b) in enumerate(zip(opened, bought, strict=True))
    ]
    program.setObjective(pulp.lpSum(costs))
    for i, (a, b) in enumerate(zip(opened, bought, strict=True)):
        program.addConstraint(b - 7 * a <= 0, f"r{i:02d}")
    program.addConstraint(pulp.lpSum(bought) >= 31.5, "total")
    return as_arrays(program)


NOTHING_FOUND: dict[str, str | int | float | bool] = {
    "mip_max_nodes": 0,
    "mip_heuristic_effort": 0.0,
    **{f"mip_heuristic_run_{kind}": False for kind in ("feasibility_jump", "rins", "rens")},
}


@pytest.mark.parametrize("off", [0.0, 1e-9, 5e-6])
@pytest.mark.parametrize("limit", ["time", "nodes"])
def test_a_start_survives_a_limit(off: float, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the incumbent, however HiGHS rounds; and nothing of the run or of others is lost."""
    fake = fake_clock(monkeypatch)
    highs = Highs(NOTHING_FOUND if limit == "nodes" else {}, Clock(10.0))
    relaxed = highs.relax(chargeable())
    start = np.concatenate([np.repeat([1.0, 0.0], [7, 13]), np.repeat([4.5, 0.0], [7, 13])])
    cost = float(highs._highs.getLp().col_cost_ @ start)
    start[:7] -= off
    highs.start_at(start)
    fake.now_s += 20.0 if limit == "time" else 0.0
    answer = highs.solve_integer()
    assert answer.outcome is Outcome.LIMIT
    assert len(answer.values) == 40
    assert answer.objective <= cost + 1e-9
    if limit == "time":
        assert answer.objective == pytest.approx(cost, abs=1e-9)
        assert answer.values[:20].tolist() == [1.0] * 7 + [0.0] * 13
    assert answer.bound <= answer.objective
    fake.now_s = 0.0
    again = Highs(clock=Clock(10.0))
    again.relax(chargeable())
    best = again.solve_integer()
    if limit == "time":
        assert highs.solve_integer().objective == pytest.approx(best.objective)
    assert relaxed.objective <= best.objective <= cost


def test_a_start_survives_a_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """That without presolve, where the first failed."""
    fake = fake_clock(monkeypatch)
    highs = Highs(clock=Clock(10.0))
    highs.relax(chargeable())
    point = highs.point_with(np.arange(20))
    highs.start_at(point)
    read, outcomes = adapter._read, iter([Outcome.FAILED, Outcome.LIMIT])

    def failing(instance: highspy.Highs, is_integer: bool) -> adapter.Answer:
        return replace(read(instance, is_integer), outcome=next(outcomes))

    monkeypatch.setattr(adapter, "_read", failing)
    fake.now_s += 20.0
    answer = highs.solve_integer()
    assert answer.values[:20].tolist() == [1.0] * 20
    assert answer.objective == pytest.approx(float(highs._highs.getLp().col_cost_ @ point))


def test_starts_that_would_be_dropped_are_errors() -> None:
    highs = Highs()
    highs.relax(chargeable())
    for values in (np.ones(39), np.ones(41), np.full(40, 0.5)):
        with pytest.raises(SolverError, match="not complete, or not integer"):
            highs.start_at(values)
