"""The relaxation of the integer program: its arrays, start and bound, and plans from it. Also the
repairs of an answer to the integer program itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import Basis, BoolArray, FloatArray, IntArray, Problem
from autopar.solver.adapter import Highs, LinearProgram, Outcome
from autopar.solver.evaluate import Evaluation
from autopar.solver.ilp import Model
from autopar.solver.memory import total_usages, usages_at
from autopar.solver.search import Search


def express(model: Model) -> LinearProgram:
    """The model for HiGHS, costs times `cost_scale`. Continuous columns have an upper limit of 1
    for HiGHS 1.15, whose presolve did not end on flows without it."""
    return LinearProgram(
        costs=model.cost * np.float64(model.cost_scale),
        lower=np.zeros(model.num_columns),
        upper=np.ones(model.num_columns),
        row_starts=model.row_starts,
        columns=model.columns,
        values=model.values,
        row_lower=model.row_lower,
        row_upper=model.row_upper,
        integer=np.flatnonzero(model.integer),
    )


# The final basis of one relaxation as the start of the next, on a problem that differs little.

_STATUS = highspy.HighsBasisStatus


def as_basis(model: Model, given: highspy.HighsBasis) -> Basis:
    """The basis `given` by HiGHS for `model`."""
    columns = np.array([status.value for status in given.col_status], np.int64)
    rows = np.array([status.value for status in given.row_status], np.int64)
    return Basis(model.column_names, columns, model.row_names, rows)


def as_start(model: Model, basis: Basis) -> highspy.HighsBasis:
    """`basis` for HiGHS and `model`. Columns that are not in it start at 0, and such rows do not
    bind. HiGHS repairs it if it is no basis then."""
    columns = _known(model.column_names, basis.column_names, basis.columns, _STATUS.kLower)
    rows = _known(model.row_names, basis.row_names, basis.rows, _STATUS.kBasic)
    start = highspy.HighsBasis()
    start.col_status = [_STATUS(status) for status in columns.tolist()]
    start.row_status = [_STATUS(status) for status in rows.tolist()]
    start.valid, start.alien = True, True
    return start


def _known(
    names: IntArray, known: IntArray, statuses: IntArray, other: highspy.HighsBasisStatus
) -> IntArray:
    """The status of each of `names` that is among `known`; `other` for the rest."""
    ours, theirs = _as_items(names), _as_items(known)
    order = np.argsort(theirs, kind="stable")
    match = order[np.searchsorted(theirs[order], ours).clip(max=len(known) - 1)]
    return np.where(theirs[match] == ours, statuses[match], other.value)


def _as_items(names: IntArray) -> IntArray:
    """Each name as one value that can be compared."""
    kinds = [(f"part{k}", names.dtype) for k in range(names.shape[1])]
    return np.ascontiguousarray(names).view(kinds).ravel()


# A lower bound on the cost from the duals of the relaxation, computed from the model.
#
# For any multipliers `u` of the rows (of the right sign), every `x` in [0, 1] that meets the rows
# has `cost x >= u b + sum_j min(0, cost_j - u A_j)`: weak duality. So the bound holds whatever the
# tolerances of the solver that found `u`. Only the rounding of these sums remains, and `ROUNDING`
# times the sum of their sizes covers it many times over. The dual of a node's row is raised until
# its cheapest choice has a reduced cost of 0, as exactly one choice is taken.

ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class DualBound:
    """`value` is below every solution's cost. In a plan that costs at most `value + gap`, column
    `j` is at most `gap / reduced_costs[j]` if that is above 0: an integer column is 0 if
    `reduced_costs[j] > gap`. Likewise it is near 1 if the reduced cost is below 0. The slack of row
    `i` is at most `gap / |row_duals[i]|`."""

    value: float
    reduced_costs: FloatArray
    row_duals: FloatArray


def dual_bound(model: Model, row_duals: FloatArray, absent: BoolArray | None = None) -> DualBound:
    """The bound that `row_duals` (per row, in units of the cost) prove.

    It holds for the plans that use no column of `absent`: their reduced cost is infinite.
    """
    at_lower, at_upper = np.isfinite(model.row_lower), np.isfinite(model.row_upper)
    duals = np.where((row_duals > 0) & ~at_lower, 0.0, row_duals)
    duals = np.where((duals < 0) & ~at_upper, 0.0, duals)
    per_entry = model.values * np.repeat(duals, np.diff(model.row_starts))
    priced = np.bincount(model.columns, weights=per_entry, minlength=model.num_columns)
    reduced = model.cost.astype(np.float64) - priced
    if absent is not None:
        reduced[absent] = np.inf
    for node, columns in enumerate(model.choices):
        there = columns[columns >= 0]
        least = reduced[there].min()
        reduced[there] -= least
        duals[node] += least
    limits = np.where(duals > 0, model.row_lower, model.row_upper)
    limits = np.where(duals == 0, 0.0, limits)
    terms = np.concatenate([duals * limits, np.minimum(reduced, 0.0)])
    slack = ROUNDING * float(np.abs(terms).sum() + np.abs(per_entry).max(initial=0.0))
    return DualBound(float(terms.sum()) - slack, reduced, duals)


def least_cost(model: Model) -> float:
    """The bound that needs no solver: the least costs of the nodes, all else free."""
    total = float(np.minimum(model.cost[~model.integer], 0).sum())
    for columns in model.choices:
        there = columns[columns >= 0]
        total += float(model.cost[there].min()) if len(there) else 0.0
    return total - ROUNDING * abs(total)


# Dives: plans from the relaxation, by fixing one choice after another.
#
# Where memory binds, the relaxation is nearly integral: a node or two are split between a fast
# choice and a small one. Each run starts from the last basis and takes few steps. On problems of
# 200 nodes with the limit binding, the better of the two dives was within 0.2 % of the optimum. The
# integer program is then small: columns with reduced costs beyond that gap are left out.

_INTEGRAL = 1e-6
_MAX_STEPS = 40
_MAX_WINDOWED_STEPS = 8
"""With windows a step takes long, and few nodes are split."""

_PATIENCE = 0.5
"""Steps of the simplex method per row after which a dive ends, with windows. A choice that changes
little takes up to 0.35; one that changes all takes three times as many as the relaxation."""

_LITTLE_PATIENCE = 0.05
"""The same if another search follows the dive."""


def rounded(model: Model, values: FloatArray) -> tuple[int, ...]:
    """Per node the choice with the largest value (the first of equals)."""
    padded = np.append(values, -1.0)
    return tuple(int(np.argmax(padded[columns])) for columns in model.choices)


def num_fractional(model: Model, values: FloatArray) -> int:
    """The number of choices that are split: neither 0 nor 1."""
    chosen = values[model.integer]
    return int(((chosen > _INTEGRAL) & (chosen < 1 - _INTEGRAL)).sum())


def dive(
    state: Search, model: Model, highs: Highs, values: FloatArray, *, once: bool = False
) -> None:
    """Submits plans of dives from the relaxation's `values` to `state`: one by value and, unless
    `once`, one by size.

    Frees all columns of `highs` at the end.
    """
    sizes = total_usages(state.problem)
    patience = (_LITTLE_PATIENCE if once else _PATIENCE) * model.num_rows
    most = int(patience) if model.windows else None
    for is_by_size in (False,) if once else (False, True):
        _dive(state, model, highs, values, sizes, most, is_by_size=is_by_size)
        highs.free()
        if state.is_finished:
            return


def _dive(
    state: Search,
    model: Model,
    highs: Highs,
    values: FloatArray,
    sizes: Sequence[IntArray],
    most: int | None,
    *,
    is_by_size: bool,
) -> None:
    """Prefers the largest value or the least usage, and among equals the other."""
    for _ in range(_MAX_WINDOWED_STEPS if model.windows else _MAX_STEPS):
        node, split = _most_split(model, values, sizes)
        if node < 0 or state.clock.expired:
            return
        keys = sizes[node][split], -values[model.choices[node][split]]
        preferred = split[np.lexsort(keys[::-1] if is_by_size else keys)]
        if not _settle(highs, model.choices[node][preferred], most):
            return
        values = highs.last.values
        choice = rounded(model, values)
        state.submit(choice, state.evaluator(choice))
        best = state.evaluation
        if best is not None and highs.last.objective > (best.objective - 1) * model.cost_scale:
            return


def _most_split(
    model: Model, values: FloatArray, sizes: Sequence[IntArray]
) -> tuple[int, IntArray]:
    """The node whose split choices differ most in usage, and these choices; -1 if none is split."""
    padded = np.append(values, 0.0)
    most, widest = (-1, np.empty(0, dtype=np.int64)), -1
    for node, columns in enumerate(model.choices):
        there = padded[columns]
        split = np.flatnonzero((there > _INTEGRAL) & (there < 1 - _INTEGRAL))
        if len(split) and (width := int(np.ptp(sizes[node][split]))) > widest:
            most, widest = (node, split), width
    return most


def _settle(highs: Highs, columns: IntArray, most: int | None) -> bool:
    """Fixes the first of `columns` at 1 that leaves the relaxation feasible. Returns whether that
    was solved within `most` steps of the simplex method."""
    for column in columns:
        only = np.array([column])
        highs.fix(only, 1.0)
        outcome = highs.solve_warm(most).outcome
        if outcome is not Outcome.INFEASIBLE:
            return outcome is Outcome.OPTIMAL
        highs.fix(only, 0.0)
    return False


# Checks of HiGHS's answer to an integer program against its evaluation, and repairs: a row that
# forbids the answer, or more integer columns.


def check_agreement(state: Search, evaluation: Evaluation, objective: float) -> None:
    """SolverError if the ILP's cost is off by more than HiGHS's tolerances. With windows, it may
    differ: the ILP may use slower paths of which more is hidden."""
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
    """Shared arcs, not yet in `extra`, of the flows that the ILP prices below their cost."""
    arcs = [
        shared
        for columns, shared, cost in zip(
            model.flows, model.shared, evaluation.flow_costs, strict=True
        )
        if cost > float(values[columns] @ model.cost[columns]) + 0.5
    ]
    return np.setdiff1d(np.concatenate([np.empty(0, dtype=np.int64), *arcs]), extra)


def cover(
    problem: Problem, model: Model, choice: tuple[int, ...], evaluation: Evaluation
) -> tuple[IntArray, FloatArray, float]:
    """A row that forbids the choices live at the peak, and all that use at least as much."""
    columns = [
        model.choices[node][(usage >= usage[choice[node]]) & (model.choices[node] >= 0)]
        for node, usage in usages_at(problem, evaluation.peak_time)
        if usage[choice[node]] > usage.min()
    ]
    if not columns:
        raise SolverError(
            f"problem {problem.name}: HiGHS's answer breaks a rule ({evaluation.violation})"
        )
    joined = np.concatenate(columns)
    return joined, np.ones(len(joined)), len(columns) - 1.0
