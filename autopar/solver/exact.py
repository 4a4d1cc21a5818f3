"""The exact path: relaxation, bound, integer program on what the bound leaves, ties.

1. The LP relaxation, and from its duals a bound that is worked out again (`bounds`).
2. Its rounding, improved by coordinate descent, is the first plan. When it costs what the bound
   says, it is optimal and no integer program is needed.
3. Otherwise columns whose reduced cost exceeds the gap are taken out, and HiGHS solves the rest.
   Its answer is evaluated again: where memory is broken by less than HiGHS's tolerance a cover row
   is added, where a flow's shared arcs are fractional they are made integer, and HiGHS runs again.
4. Among the plans of that cost the one of the lowest tie weight is found in the same way (`ties`).
"""

from __future__ import annotations

from time import process_time

import numpy as np

from autopar.errors import SolverError
from autopar.problem import IntArray, Problem
from autopar.solver.adapter import Answer, Highs, Outcome
from autopar.solver.bounds import DualBound, dual_bound, least_cost
from autopar.solver.cutoff import forbid_above, largest_cost
from autopar.solver.evaluate import Evaluation, Evaluator
from autopar.solver.express import express
from autopar.solver.heuristic import Descent
from autopar.solver.ilp import FloatArray, Model, build
from autopar.solver.search import SAME_COST, Clock, Progress, Search
from autopar.solver.ties import WEIGHT_LIMIT, tie_weight, tie_weights

_MAX_ROUNDS = 500
_TIE_NODES = 2_000
_INTEGRAL = 1e-6
_LARGEST_COST = 2**40
"""Costs beyond this would set the scale of all others: what no plan can use is forbidden first."""


def search(problem: Problem, clock: Clock, progress: Progress) -> Search:
    """Solves `problem` as far as the clock allows."""
    started = process_time()
    state = Search(problem, Evaluator(problem), clock, progress)
    if clock.limit_s is not None or largest_cost(problem) > _LARGEST_COST:
        _descend(state, None)
        if state.evaluation is not None:
            problem = forbid_above(problem, state.evaluation.objective)
    model = build(problem)
    state.raise_bound(least_cost(model))
    if any((columns < 0).all() for columns in model.choices):
        state.infeasible = True
        return state
    highs, answer = _relax(state, model, started)
    duals = _read_relaxation(state, model, answer)
    if state.infeasible:
        return state
    if not state.proven and answer.outcome is Outcome.OPTIMAL:
        _solve_integer(state, model, highs, duals)
    if state.proven and duals is not None and not clock.expired:
        _break_ties(state, model, highs, duals)
    return state


def _descend(state: Search, start: tuple[int, ...] | None) -> None:
    descent = Descent(state.problem, state.evaluator, state.clock)
    starts = [start] if start else [descent.grown(), descent.leanest()]
    for choice in starts:
        found = descent.improve(choice)
        if found is not None:
            state.offer(*found)


def _relax(state: Search, model: Model, started: float) -> tuple[Highs, Answer]:
    program = express(model)
    highs = Highs({"mip_abs_gap": (1 - 2 * SAME_COST) * model.cost_scale})
    highs.limit_time(state.clock.left_s())
    built = process_time()
    answer = highs.relax(program)
    state.statistics |= {
        "variables": model.num_columns,
        "integer_variables": int(model.integer.sum()),
        "rows": model.num_rows,
        "nonzeros": len(model.values),
        "build_cpu_s": built - started,
        "lp_cpu_s": process_time() - built,
        "nodes": 0,
    }
    state.progress(f"relaxation of {model.num_columns} columns: {answer.detail}")
    return highs, answer


def _read_relaxation(state: Search, model: Model, answer: Answer) -> DualBound | None:
    """Bound and first plan from the relaxation. None when it gave no duals."""
    if answer.outcome is Outcome.INFEASIBLE:
        state.infeasible = state.evaluation is None
        if not state.infeasible:
            state.statistics["fault"] = "HiGHS calls a problem infeasible that has a plan"
        return None
    if answer.outcome is Outcome.FAILED:
        raise SolverError(f"HiGHS failed on the relaxation: {answer.detail}")
    if not len(answer.row_duals):
        return None
    duals = dual_bound(model, answer.row_duals / model.cost_scale)
    state.raise_bound(duals.value)
    if answer.outcome is not Outcome.OPTIMAL:
        return duals
    choice = rounded(model, answer.values)
    state.statistics["lp_fractional"] = _num_fractional(model, answer.values)
    state.offer(choice, state.evaluator(choice))
    if not state.proven:
        _descend(state, choice)
    return duals


def _solve_integer(state: Search, model: Model, highs: Highs, duals: DualBound | None) -> None:
    started = process_time()
    if duals is not None and state.evaluation is not None:
        _restrict(highs, duals, state.gap + SAME_COST)
    extra = np.empty(0, dtype=np.int64)
    for _ in range(_MAX_ROUNDS):
        highs.limit_time(state.clock.left_s())
        answer = highs.solve_integer(extra)
        state.statistics["nodes"] = int(state.statistics["nodes"]) + answer.num_nodes
        if answer.outcome is Outcome.INFEASIBLE:
            state.infeasible = state.evaluation is None
            if not state.infeasible:
                state.statistics["fault"] = "HiGHS calls a problem infeasible that has a plan"
            break
        if answer.outcome is Outcome.FAILED and state.evaluation is None:
            raise SolverError(f"HiGHS failed on the integer program: {answer.detail}")
        _raise_bound(state, answer.bound / model.cost_scale)
        if not len(answer.values):
            break
        choice = rounded(model, answer.values)
        evaluation = state.evaluator(choice)
        state.offer(choice, evaluation)
        if state.proven or answer.outcome is not Outcome.OPTIMAL:
            break
        if not evaluation.feasible:
            highs.add_limit(*_cover(state.problem, model, choice, evaluation))
            continue
        fractional = _undercharged(model, answer.values, evaluation, extra)
        if not len(fractional):
            _check_agreement(state, evaluation, answer.objective / model.cost_scale)
            break
        extra = np.union1d(extra, fractional)
    state.statistics["mip_cpu_s"] = process_time() - started


def _raise_bound(state: Search, bound: float) -> None:
    """A bound from HiGHS on what was left in: what was taken out costs more than the best plan."""
    if state.evaluation is not None:
        bound = min(bound, float(state.evaluation.objective))
    state.raise_bound(bound)


def _check_agreement(state: Search, evaluation: Evaluation, objective: float) -> None:
    """The ILP may be off by HiGHS's tolerances, not by more."""
    if evaluation.exact and evaluation.objective > objective + 1 + 1e-6 * abs(objective):
        raise SolverError(
            f"problem {state.problem.name}: HiGHS says {objective:.1f} for a plan that costs "
            f"{evaluation.objective}; please report this with the problem"
        )


def _restrict(highs: Highs, duals: DualBound, gap: float) -> None:
    """Leaves only what plans within `gap` of the bound can use."""
    highs.fix(np.flatnonzero(duals.reduced_costs > gap), 0.0)
    highs.fix(np.flatnonzero(duals.reduced_costs < -gap), 1.0)
    rows = np.flatnonzero(duals.row_duals)
    of_rows = duals.row_duals[rows]
    highs.limit_slack(rows, of_rows < 0, gap / np.abs(of_rows))


def rounded(model: Model, values: FloatArray) -> tuple[int, ...]:
    """Per node the choice with the largest value (the first of equals)."""
    padded = np.append(values, -1.0)
    return tuple(int(np.argmax(padded[columns])) for columns in model.choices)


def _num_fractional(model: Model, values: FloatArray) -> int:
    chosen = values[model.integer]
    return int(((chosen > _INTEGRAL) & (chosen < 1 - _INTEGRAL)).sum())


def _undercharged(
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


def _cover(
    problem: Problem, model: Model, choice: tuple[int, ...], evaluation: Evaluation
) -> tuple[IntArray, FloatArray, float]:
    """A row that forbids what is live at the peak, and whatever uses at least as much."""
    columns: list[IntArray] = []
    count = 0
    for node, (start, stop) in enumerate(problem.intervals):
        usages = problem.usages[node]
        used = usages[choice[node]]
        if start <= evaluation.peak_time < stop and used > usages.min():
            count += 1
            columns.append(model.choices[node][(usages >= used) & (model.choices[node] >= 0)])
    if not count:
        raise SolverError(
            f"problem {problem.name}: HiGHS's answer breaks a rule ({evaluation.violation})"
        )
    joined = np.concatenate(columns)
    return joined, np.ones(len(joined)), count - 1.0


def _break_ties(state: Search, model: Model, highs: Highs, duals: DualBound) -> None:
    assert state.evaluation is not None
    started = process_time()
    best = state.evaluation.objective
    gap = best - duals.value
    weights = tie_weights(state.problem)
    _restrict(highs, duals, gap + SAME_COST)
    if gap >= 1 - SAME_COST:
        there = np.flatnonzero(model.cost)
        scaled = model.cost[there] * np.float64(model.cost_scale)
        highs.add_limit(there, scaled, (best + 0.5) * model.cost_scale)
    objective = np.zeros(model.num_columns)
    for columns, weight in zip(model.choices, weights, strict=True):
        objective[columns[columns >= 0]] = weight[columns >= 0] * _WEIGHT_SCALE
    highs.minimise(objective)
    highs.set_option("mip_abs_gap", _WEIGHT_SCALE / 2)
    highs.limit_time(state.clock.left_s())
    answer = highs.solve_relaxed()
    if len(answer.values) and _num_fractional(model, answer.values):
        highs.set_option("mip_max_nodes", _TIE_NODES)
        highs.limit_time(state.clock.left_s())
        answer = highs.solve_integer(np.concatenate([np.empty(0, dtype=np.int64), *model.shared]))
    state.statistics["ties"] = "unbroken"
    if len(answer.values) and answer.outcome is Outcome.OPTIMAL:
        choice = rounded(model, answer.values)
        evaluation = state.evaluator(choice)
        if evaluation.feasible and evaluation.objective == best:
            state.statistics["ties"] = "broken"
            if tie_weight(weights, choice) < tie_weight(weights, state.choice):
                state.choice, state.evaluation = choice, evaluation
    state.statistics["ties_cpu_s"] = process_time() - started


_WEIGHT_SCALE = 1024 / WEIGHT_LIMIT
