"""The plan of the lowest tie weight among those of the lowest cost.

Columns that no plan of that cost can use are left out by their reduced costs, and the tie weight
is the objective for the rest. If the relaxation costs as much as the plan, the rest is exactly the
plans of that cost, and nearly always one more relaxation is enough.

If the relaxation has a gap, which it has where memory binds, a row limits the cost, and an integer
program is needed. It is as hard as the first one. So on large problems the choices that take memory
stay fixed, and only the others are decided: with memory fixed, the relaxation has no gap.
`statistics["ties"]` is then "broken beside memory".
"""

from __future__ import annotations

from time import process_time

import numpy as np

from autopar.ir.problem import BoolArray, IntArray
from autopar.solver.adapter import Answer, Highs, Outcome
from autopar.solver.builder import WEIGHT_LIMIT, tie_weight, tie_weights
from autopar.solver.ilp import Model
from autopar.solver.relaxation import DualBound, dual_bound, num_fractional, rounded
from autopar.solver.search import SAME_COST, Search

MAX_OPEN = 4_000
"""The most open columns of the integer program; with more, memory choices stay fixed."""
_MAX_NODES = 2_000
_WEIGHT_SCALE = 1024 / WEIGHT_LIMIT


def restrict(highs: Highs, model: Model, duals: DualBound, gap: float) -> None:
    """Leaves only the columns that plans within `gap` of the bound can use."""
    reduced = duals.reduced_costs
    highs.fix(_whole_columns(model, reduced > gap), 0.0)
    highs.fix(_whole_columns(model, reduced < -gap), 1.0)
    # The hidden part of a window is continuous.
    hidden = model.hidden[np.abs(reduced[model.hidden]) > gap]
    of_hidden = reduced[hidden]
    part = gap / np.abs(of_hidden)
    lower, upper = np.where(of_hidden < 0, 1 - part, 0.0), np.where(of_hidden > 0, part, 1.0)
    highs.keep_between(hidden, lower, upper)
    rows = np.flatnonzero(duals.row_duals)
    of_rows = duals.row_duals[rows]
    highs.limit_slack(rows, of_rows < 0, gap / np.abs(of_rows))


def _whole_columns(model: Model, which: BoolArray) -> IntArray:
    """The columns of `which` that are 0 or 1 in a plan."""
    return np.setdiff1d(np.flatnonzero(which), model.hidden)


def break_ties(state: Search, model: Model, highs: Highs, duals: DualBound) -> None:
    """Replaces the optimal plan of `state` by the one of the lowest tie weight, where it can."""
    assert state.evaluation is not None
    started = process_time()
    best = state.evaluation.objective
    state.statistics["ties"] = "unbroken"
    scope = "broken"
    unused = duals.reduced_costs > best - duals.value + SAME_COST
    unused[model.hidden] = False
    num_open = model.num_columns - int(unused.sum())
    if best - duals.value >= 1 - SAME_COST and num_open > MAX_OPEN:
        held = _hold_memory(state, model, highs, unused)
        if held is None:
            return
        duals, scope = held, "broken beside memory"
    restrict(highs, model, duals, best - duals.value + SAME_COST)
    answer = _lowest_weight(state, model, highs, best, gap=best - duals.value)
    if len(answer.values) and answer.outcome is Outcome.OPTIMAL:
        choice = rounded(model, answer.values)
        evaluation = state.evaluator(choice)
        if evaluation.feasible and evaluation.objective == best:
            state.statistics["ties"] = scope
            weights = tie_weights(state.problem)
            if tie_weight(weights, choice) < tie_weight(weights, state.choice):
                state.choice, state.evaluation = choice, evaluation
    state.statistics["ties_cpu_s"] = process_time() - started


def _hold_memory(state: Search, model: Model, highs: Highs, unused: BoolArray) -> DualBound | None:
    """Fixes the nodes whose choices differ in memory, and bounds the cost of the rest without the
    columns in `unused`; None if that bound is below the plan's cost."""
    absent = unused.copy()
    taken: list[int] = []
    for node, columns in enumerate(model.choices):
        usages = state.problem.usages[node]
        if any(usage.start < usage.stop and np.ptp(usage.amounts) for usage in usages):
            absent[columns[columns >= 0]] = True
            taken.append(int(columns[state.choice[node]]))
    absent[taken] = False
    highs.free()
    highs.fix(np.flatnonzero(absent), 0.0)
    highs.fix(np.array(taken, dtype=np.int64), 1.0)
    answer = highs.solve_relaxed()
    if answer.outcome is not Outcome.OPTIMAL:
        return None
    duals = dual_bound(model, answer.row_duals[: model.num_rows] / model.cost_scale, absent)
    assert state.evaluation is not None
    return duals if state.evaluation.objective - duals.value < 1 - SAME_COST else None


def _lowest_weight(state: Search, model: Model, highs: Highs, best: int, *, gap: float) -> Answer:
    """Minimizes the tie weight over the open columns of `highs`, at a cost of at most `best`."""
    if gap >= 1 - SAME_COST:
        there = np.flatnonzero(model.cost)
        scaled = model.cost[there] * np.float64(model.cost_scale)
        highs.add_limit(there, scaled, (best + 0.5) * model.cost_scale)
    objective = np.zeros(model.num_columns)
    for columns, weight in zip(model.choices, tie_weights(state.problem), strict=True):
        objective[columns[columns >= 0]] = weight[columns >= 0] * _WEIGHT_SCALE
    highs.minimise(objective)
    highs.set_option("mip_abs_gap", _WEIGHT_SCALE / 2)
    answer = highs.solve_relaxed()
    if not len(answer.values) or not num_fractional(model, answer.values):
        return answer
    highs.set_option("mip_max_nodes", _MAX_NODES)
    return highs.solve_integer(np.concatenate([np.empty(0, dtype=np.int64), *model.shared]))
