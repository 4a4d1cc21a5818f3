"""Plans with fewer choices, and other memory limits, from one relaxation.

The relaxation of a problem is solved once. With some choices taken out, the simplex method goes on
from its last basis and takes few steps. The duals then prove a bound on all plans without those
choices (`relaxation`). The rounded values are a plan, mostly one that costs no more than the bound.
Every query starts from the same basis, so that no result depends on earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import BoolArray, Problem, Solution, Status
from autopar.solver.adapter import Highs, Outcome
from autopar.solver.evaluate import Evaluator
from autopar.solver.ilp import build_model
from autopar.solver.relaxation import dual_bound, express, rounded
from autopar.solver.search import least_whole

_RELAXATION = "relaxation"


@dataclass(frozen=True, slots=True)
class Restriction:
    """The plans that take only some choices: none costs less than `bound`, and `solution` is one of
    them, or None if the rounded relaxation is no plan."""

    bound: int
    solution: Solution | None


class Sensitivity:
    """Answers about variations of `problem`, which must have a solution. SolverError if HiGHS gives
    no duals."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._model = build_model(problem)
        self._highs = Highs()
        answer = self._highs.relax(express(self._model))
        if answer.outcome is not Outcome.OPTIMAL or not len(answer.row_duals):
            raise SolverError(f"HiGHS gives no duals of the relaxation: {answer.detail}")
        self._row_duals = answer.row_duals / self._model.cost_scale
        self._basis = self._highs.basis()
        self._evaluator = Evaluator(problem)
        self.bound = least_whole(dual_bound(self._model, self._row_duals).value)

    def with_only(self, allowed: Mapping[int, BoolArray]) -> Restriction | None:
        """The restriction in which each of these nodes takes one of its `allowed` choices; None if
        the relaxation proves that impossible."""
        model, highs = self._model, self._highs
        absent = np.zeros(model.num_columns, np.bool_)
        for node, left in allowed.items():
            columns = model.choices[node]
            if not (columns[left] >= 0).any():
                return None
            absent[columns[~left & (columns >= 0)]] = True
        highs.free()
        highs.start_from(self._basis)
        highs.fix(np.flatnonzero(absent), 0.0)
        answer = highs.solve_warm()
        if answer.outcome is Outcome.INFEASIBLE:
            return None
        if answer.outcome is not Outcome.OPTIMAL or not len(answer.row_duals):
            raise SolverError(f"HiGHS failed on the relaxation: {answer.detail}")
        proven = least_whole(dual_bound(model, answer.row_duals / model.cost_scale, absent).value)
        bound = max(self.bound, proven)
        choice = rounded(model, np.where(absent, -1.0, answer.values))
        evaluation = self._evaluator(choice)
        if not evaluation.feasible:
            return Restriction(bound, None)
        bound = min(bound, evaluation.objective)
        status = Status.OPTIMAL if bound == evaluation.objective else Status.FEASIBLE
        solution = Solution(
            status, choice, evaluation.arcs, evaluation.objective, bound, _RELAXATION
        )
        return Restriction(bound, solution)

    def bound_with_limit(self, usage_limit: int) -> int:
        """A lower bound on plans under another limit of usages: by the duals as they are, or by new
        ones if the numbers of rows differ, as where the limit does not bind at all."""
        other = replace(self.problem, usage_limit=usage_limit)
        model = build_model(other)
        if model.num_rows != self._model.num_rows:
            return Sensitivity(other).bound
        return least_whole(dual_bound(model, self._row_duals).value)
