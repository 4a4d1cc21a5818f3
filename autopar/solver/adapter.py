"""The adapter to HiGHS, which takes a program as arrays and reads back the true result.

`Highs` checks every option, and reads status, incumbent and bound from HiGHS itself. It can run the
program once more with other costs, with columns fixed, or with integer columns after a relaxation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import highspy
import numpy as np
import numpy.typing as npt

from autopar.errors import SolverError
from autopar.ir.problem import BoolArray, FloatArray, IntArray
from autopar.solver.clock import Clock

SOLVER = f"HiGHS {highspy.Highs().version()}"

Option = str | int | float | bool
_ANY_NUMBER, _ANY_COST = 2**31 - 1, float("inf")
_STEP_NS, _STEPS_OF_INTERIOR, _START_STEPS = 16, 200, 75
"""The work of a step of the simplex method per row, in nanoseconds (3 to 30 for programs of 6,000
to 44,000 rows, two shared x86-64 cores, November 2026); the steps that one of the interior point
method counts as; and those that the start of a run does."""

_NEARLY_WHOLE = 1e-5
"""The largest distance of a column of a point from the integer that it stands for."""

_INTERIOR: dict[str, Option] = {
    "solver": "ipm",
    "ipm_optimality_tolerance": 1e-7,
    "start_crossover_tolerance": 1e-4,
}
"""The interior point method stops early, and the simplex method ends at the optimum. With HiGHS's
1e-8 the interior point method stalls near the end where costs are large, and the run is wasted."""


class Outcome(Enum):
    """How a run of HiGHS ended. `LIMIT` may come with an incumbent, `FAILED` with anything."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    LIMIT = "limit"
    FAILED = "failed"


_OUTCOMES: dict[highspy.HighsModelStatus, Outcome] = {
    highspy.HighsModelStatus.kOptimal: Outcome.OPTIMAL,
    highspy.HighsModelStatus.kModelEmpty: Outcome.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: Outcome.INFEASIBLE,
    # No column is unbounded in our models, so the alternative is settled.
    highspy.HighsModelStatus.kUnboundedOrInfeasible: Outcome.INFEASIBLE,
    highspy.HighsModelStatus.kTimeLimit: Outcome.LIMIT,
    highspy.HighsModelStatus.kIterationLimit: Outcome.LIMIT,
    highspy.HighsModelStatus.kSolutionLimit: Outcome.LIMIT,
    highspy.HighsModelStatus.kObjectiveBound: Outcome.LIMIT,
    highspy.HighsModelStatus.kObjectiveTarget: Outcome.LIMIT,
    highspy.HighsModelStatus.kInterrupt: Outcome.LIMIT,
}


@dataclass(frozen=True, slots=True, eq=False)
class LinearProgram:
    """`min costs x` with `row_lower <= A x <= row_upper` and `lower <= x <= upper`; `A` in
    compressed rows. `integer` are the columns that are integer once it is not relaxed."""

    costs: FloatArray
    lower: FloatArray
    upper: FloatArray
    row_starts: IntArray
    columns: IntArray
    values: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray
    integer: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The result of HiGHS. `values` is empty without a feasible point. `bound` is a lower bound on
    the objective (-inf when none is known). `row_duals` is empty for integer runs."""

    outcome: Outcome
    objective: float
    bound: float
    values: FloatArray
    row_duals: FloatArray
    num_nodes: int
    detail: str


class Highs:
    """HiGHS in this process. Deterministic: one thread, seed 0, and by default no gap or clock."""

    def __init__(
        self, options: Mapping[str, Option] | None = None, clock: Clock | None = None
    ) -> None:
        """`options` are HiGHS's own, beside the fixed ones. Runs end when the `clock` expires."""
        self.options: dict[str, Option] = {
            "output_flag": False,
            "threads": 1,
            "random_seed": 0,
            "mip_rel_gap": 0.0,
            **(options or {}),
        }
        self.answer: Answer | None = None
        self._highs = highspy.Highs()
        self._integer: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._is_integer = False
        self._clock = clock or Clock(None)
        self._point: FloatArray | None = None

    def relax(
        self,
        program: LinearProgram,
        patience: int | None = None,
        start: highspy.HighsBasis | None = None,
        enough: float = _ANY_COST,
    ) -> Answer:
        """Loads the program and solves its relaxation, without presolve, from the basis `start` if
        there is one. If the simplex method takes more steps than `patience`, as with the dense rows
        of windows, the interior point method takes over, with a crossover to a basis. Once the
        objective is `enough`, the run ends at a `LIMIT`, with its duals.

        On the programs of `ilp`, presolve costs more than it saves: it folds the flows' sparse
        states into dense rows. Without it, runs were 1 to 13 times as fast (three axes).
        """
        # A scheduler for another number of threads makes every run fail in this process.
        highspy.Highs.resetGlobalScheduler(True)
        self._highs, self._is_integer = highspy.Highs(), False
        most = self.options.get("simplex_iteration_limit", _ANY_NUMBER)
        first: dict[str, Option] = {
            "presolve": "off",
            "simplex_iteration_limit": most if patience is None else patience,
            "objective_bound": enough,
        }
        for name, value in {**self.options, **first}.items():
            self.set_option(name, value)
        self._take_over(program)
        if start is not None:
            self._highs.setBasis(start)
        self._run()
        self.set_option("simplex_iteration_limit", most)
        self.set_option("objective_bound", _ANY_COST)
        status = self._highs.getModelStatus()
        if patience is not None and status == highspy.HighsModelStatus.kIterationLimit:
            self._run_interior()
        self.set_option("presolve", "choose")
        return self.last

    def _run_interior(self) -> None:
        """Runs the interior point method. If that fails, as on a few programs with a part of the
        columns, the simplex method runs to its end."""
        self._highs.clearSolver()
        for name, value in _INTERIOR.items():
            self.set_option(name, value)
        self._run()
        self.set_option("solver", "choose")
        if self.last.outcome is Outcome.FAILED:
            self._highs.clearSolver()
            self._run()

    def set_option(self, name: str, value: Option) -> None:
        """Sets an option of HiGHS; SolverError when HiGHS refuses it."""
        if self._highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise SolverError(f"HiGHS {self._highs.version()} refuses the option {name} = {value}")

    def _take_over(self, program: LinearProgram) -> None:
        """Passes the relaxation to HiGHS, by rows, in one call."""
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(program.costs), len(program.row_lower)
        model.col_cost_ = program.costs
        model.col_lower_, model.col_upper_ = program.lower, program.upper
        model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = program.row_starts.astype(np.int32)
        matrix.index_ = program.columns.astype(np.int32)
        matrix.value_ = program.values
        if self._highs.passModel(model) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS refuses the model")
        self._rows = program.row_lower, program.row_upper
        self._columns = program.lower, program.upper
        self._integer = program.integer.astype(np.int32)

    @property
    def last(self) -> Answer:
        """The answer of the latest run."""
        if self.answer is None:
            raise SolverError("HiGHS has not been run")
        return self.answer

    def minimise(self, costs: FloatArray) -> None:
        """Another objective for the runs that follow."""
        columns = np.arange(len(costs), dtype=np.int32)
        self._highs.changeColsCost(len(columns), columns, costs)

    def add_limit(self, columns: npt.NDArray[np.int64], values: FloatArray, upper: float) -> None:
        """A further row, `values . x[columns] <= upper`."""
        self._highs.addRow(-np.inf, upper, len(columns), columns.astype(np.int32), values)

    def fix(self, columns: npt.NDArray[np.int64], value: float) -> None:
        """Fixes columns for the runs that follow."""
        values = np.full(len(columns), value)
        self.keep_between(columns, values, values)

    def keep_between(
        self, columns: npt.NDArray[np.int64], lower: FloatArray, upper: FloatArray
    ) -> None:
        """Other limits of columns for the runs that follow."""
        self._highs.changeColsBounds(len(columns), columns.astype(np.int32), lower, upper)

    def free(self) -> None:
        """Resets all columns and rows of the model to their own limits."""
        columns = np.arange(len(self._columns[0]), dtype=np.int32)
        self._highs.changeColsBounds(len(columns), columns, *self._columns)
        rows = np.arange(len(self._rows[0]), dtype=np.int32)
        self._highs.changeRowsBounds(len(rows), rows, *self._rows)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def basis(self) -> highspy.HighsBasis:
        """The basis of the last run, for `start_from`."""
        return self._highs.getBasis()

    def start_from(self, basis: highspy.HighsBasis) -> None:
        """Sets the basis from which `solve_warm` starts, and clears all else of earlier runs."""
        self._highs.clearSolver()
        self._highs.setBasis(basis)

    def limit_slack(
        self, rows: npt.NDArray[np.int64], at_upper: BoolArray, slack: FloatArray
    ) -> None:
        """Keeps rows within `slack` of their upper (else lower) limit in the runs that follow."""
        lower, upper = (side[rows] for side in self._rows)
        self._highs.changeRowsBounds(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            len(rows),
            rows.astype(np.int32),
            np.where(at_upper, np.maximum(lower, upper - slack), lower),
            np.where(at_upper, upper, np.minimum(upper, lower + slack)),
        )

    def solve_integer(
        self, extra: npt.NDArray[np.int64] | None = None, enough: float = _ANY_COST
    ) -> Answer:
        """Runs with the integer columns, and those of `extra`, integer. Solutions that cost
        `enough` or more are not searched, though the run may find one."""
        columns = self._integer
        if extra is not None and len(extra):
            columns = np.union1d(columns, extra).astype(np.int32)
        self._set_kind(columns, highspy.HighsVarType.kInteger)
        self.set_option("objective_bound", enough)
        try:
            self._run_integer()
        finally:
            self.set_option("objective_bound", _ANY_COST)
        self.answer = replace(self.last, bound=min(self.last.bound, enough))
        return self.answer

    def point_with(self, columns: npt.NDArray[np.int64]) -> FloatArray:
        """The cheapest point of the relaxation in which `columns` are 1; empty if there is none.
        Frees all columns at the end."""
        self.fix(columns, 1.0)
        values = self.solve_warm().values
        self.free()
        return values

    def start_at(self, values: FloatArray) -> None:
        """Sets the start of the next integer run: its incumbent, even if the run ends at a limit
        before it finds another.

        HiGHS tests a point with all columns as it is. For columns that are missing, or off by more
        than its tolerance, it would have to solve a program, and at a limit it drops the start
        instead. So integer columns are rounded, and others that are integer but for a rounding
        error. SolverError if a column is missing, or an integer column is not near an integer.
        """
        whole = np.round(values)
        is_whole = np.abs(values - whole) <= _NEARLY_WHOLE
        if len(values) != self._highs.getNumCol() or not is_whole[self._integer].all():
            raise SolverError("the start of an integer program is not complete, or not integer")
        self._point = np.where(is_whole, whole, values)

    def _run_integer(self) -> None:
        self._run_from_point()
        if self.last.outcome is Outcome.FAILED:
            # HiGHS's presolve sometimes ends with a point that breaks a row, and reports that.
            self._highs.clearSolver()
            self.set_option("presolve", "off")
            self._run_from_point()
            self.set_option("presolve", "choose")
        self._point = None

    def _run_from_point(self) -> None:
        if self._point is not None:
            start = highspy.HighsSolution()
            start.col_value = self._point.tolist()
            self._highs.setSolution(start)
        self._run()

    def solve_warm(self, most: int | None = None) -> Answer:
        """Runs the relaxation from the last basis, at most `most` steps of the simplex method."""
        usual = int(self.options.get("simplex_iteration_limit", _ANY_NUMBER))
        self.set_option("presolve", "off")
        self.set_option("simplex_iteration_limit", usual if most is None else min(most, usual))
        self._run()
        self.set_option("simplex_iteration_limit", usual)
        self.set_option("presolve", "choose")
        return self.last

    def solve_relaxed(self) -> Answer:
        """Runs with all columns continuous, from scratch: for a changed objective, presolve saves
        more time than the last basis."""
        columns = np.arange(self._highs.getNumCol(), dtype=np.int32)
        self._set_kind(columns, highspy.HighsVarType.kContinuous)
        self._highs.clearSolver()
        self._run()
        return self.last

    def _set_kind(self, columns: npt.NDArray[np.int32], kind: highspy.HighsVarType) -> None:
        kinds = np.full(len(columns), kind.value, dtype=np.uint8)
        self._highs.changeColsIntegrality(len(columns), columns, kinds)
        self._is_integer = kind is highspy.HighsVarType.kInteger and len(columns) > 0

    def _run(self) -> None:
        # For an integer program, HiGHS compares the limit with the time of this run. For a linear
        # one it takes the time of all runs so far, of either kind (1.13 and 1.15).
        spent_s = 0.0 if self._is_integer else self._highs.getRunTime()
        self.set_option("time_limit", spent_s + self._clock.left_s())
        self._highs.run()
        self._clock.count(self._highs.getNumRow() * _STEP_NS * _num_steps(self._highs))
        self.answer = _read(self._highs, self._is_integer)


def _num_steps(highs: highspy.Highs) -> int:
    """The steps of the last run. Of what was not run, HiGHS says -1."""
    info = highs.getInfo()
    steps = max(0, info.simplex_iteration_count) + max(0, info.crossover_iteration_count)
    return _START_STEPS + steps + _STEPS_OF_INTERIOR * max(0, info.ipm_iteration_count)


def _read(highs: highspy.Highs, is_integer: bool) -> Answer:
    status = highs.getModelStatus()
    outcome = _OUTCOMES.get(status, Outcome.FAILED)
    info = highs.getInfo()
    solution = highs.getSolution()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if outcome is Outcome.OPTIMAL and not feasible:
        outcome = Outcome.FAILED
    bound = -np.inf
    if is_integer:
        bound = info.mip_dual_bound
    elif outcome is Outcome.OPTIMAL:
        bound = info.objective_function_value
    has_duals = not is_integer and solution.dual_valid
    return Answer(
        outcome=outcome,
        objective=info.objective_function_value,
        bound=bound,
        values=np.array(solution.col_value) if feasible else np.empty(0),
        row_duals=np.array(solution.row_dual) if has_duals else np.empty(0),
        num_nodes=max(0, info.mip_node_count),
        detail=highs.modelStatusToString(status),
    )
