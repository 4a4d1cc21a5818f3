"""The adapter tells the truth where stock PuLP does not."""

from __future__ import annotations

import highspy
import pulp
import pytest

from autopar.errors import SolverError
from autopar.solver.adapter import Highs, Outcome
from autopar.solver.clock import Clock
from autopar.solver.express import express
from autopar.solver.ilp import build_model
from tests.solver.synthetic import transformer


def knapsack(size: int = 60) -> pulp.LpProblem:
    """Items of nearly equal worth, hard to prove."""
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    take = [program.add_variable(f"x{i:04d}", 0, 1, pulp.LpInteger) for i in range(size)]
    weights = [[(i * j * 7919) % 97 + 50 for i in range(size)] for j in range(1, 13)]
    program.setObjective(pulp.lpSum(-((i * 37) % 11 + 40) * x for i, x in enumerate(take)))
    for row, weight in enumerate(weights):
        limit = pulp.lpSum(w * x for w, x in zip(weight, take, strict=True)) <= sum(weight) // 2
        program.addConstraint(limit, f"r{row}")
    return program


def test_the_columns_of_a_program_are_those_that_pulp_finds() -> None:
    """In the order of their names, which is that of the model; one that no row has is there too."""
    model = build_model(transformer(1, (2, 4)))
    program = express(model)
    known = program.variables()
    assert len(known) == model.num_columns
    assert [*(program.objective or ())] == known
    assert pulp.LpProblem.variables(program) == known
    assert [v.cat == pulp.LpInteger for v in known] == model.integer.tolist()


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


def test_pulp_hears_of_a_limit() -> None:
    program = knapsack()
    Highs(clock=Clock(0.0)).relax(program)
    assert program.status == pulp.LpStatusNotSolved


def test_a_refused_option_is_an_error() -> None:
    with pytest.raises(SolverError, match="no_such_option"):
        Highs({"no_such_option": 1}).relax(knapsack())


def test_an_infeasible_program() -> None:
    program = pulp.LpProblem("none", pulp.LpMinimize)
    x = program.add_variable("x0", 0, 1)
    program.setObjective(pulp.lpSum([x]))
    program.addConstraint(pulp.lpSum([x]) >= 2, "r0")
    answer = Highs().relax(program)
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
    answer = Highs().relax(program)
    assert answer.objective == pytest.approx(3 * 1 + 2 * 4)
    assert answer.values.tolist() == pytest.approx([1, 4])
    assert (x.varValue, y.varValue) == pytest.approx((1, 4))


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
