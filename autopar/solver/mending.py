"""What is wrong with HiGHS's answer to an integer program, once that is evaluated again, and what
mends it: a row that forbids it, columns that are to be integer too."""

from __future__ import annotations

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import FloatArray, IntArray, Problem
from autopar.solver.evaluate import Evaluation
from autopar.solver.ilp import Model
from autopar.solver.memory import usages_at
from autopar.solver.search import Search


def check_agreement(state: Search, evaluation: Evaluation, objective: float) -> None:
    """The ILP may be off by HiGHS's tolerances, not by more; with windows, it may find slower ways
    of which more is hidden."""
    if state.problem.windows:
        return
    if evaluation.exact and evaluation.objective > objective + 1 + 1e-6 * abs(objective):
        raise SolverError(
            f"problem {state.problem.name}: HiGHS says {objective:.1f} for a plan that costs "
            f"{evaluation.objective}; please report this with the problem"
        )


def undercharged(
    model: Model, values: FloatArray, evaluation: Evaluation, extra: IntArray
) -> IntArray:
    """Shared arcs of the flows that the ILP prices below what they cost, not yet in `extra`."""
    found = [
        shared
        for columns, shared, cost in zip(
            model.flows, model.shared, evaluation.flow_costs, strict=True
        )
        if cost > float(values[columns] @ model.cost[columns]) + 0.5
    ]
    return np.setdiff1d(np.concatenate([np.empty(0, dtype=np.int64), *found]), extra)


def cover(
    problem: Problem, model: Model, choice: tuple[int, ...], evaluation: Evaluation
) -> tuple[IntArray, FloatArray, float]:
    """A row that forbids what is live at the peak, and whatever uses at least as much."""
    columns: list[IntArray] = []
    count = 0
    for node, usage in usages_at(problem, evaluation.peak_time):
        used = usage[choice[node]]
        if used > usage.min():
            count += 1
            columns.append(model.choices[node][(usage >= used) & (model.choices[node] >= 0)])
    if not count:
        raise SolverError(
            f"problem {problem.name}: HiGHS's answer breaks a rule ({evaluation.violation})"
        )
    joined = np.concatenate(columns)
    return joined, np.ones(len(joined)), count - 1.0
