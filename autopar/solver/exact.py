"""The exact search: relaxation, bound, integer program on the open columns, tie breaking.

1. HiGHS solves the LP relaxation; a bound is computed from its duals (`relaxation`).
2. The rounded relaxation is the first plan. If it costs as much as the bound, it is optimal and no
   integer program is needed. Else diving and coordinate descent look for better plans.
3. Columns whose reduced cost exceeds the gap are taken out, and HiGHS solves the rest.
   With windows, relaxations take long. HiGHS then first gets only the columns of plans near the
   bound (`_narrow`), in place of dives: memory leaves a few nodes split, which affect others.
   For the programs of column generation even that takes too long: there plans come of dives.
   HiGHS's answer is evaluated: where it exceeds memory by less than HiGHS's tolerance, a cover row
   is added. Where a flow's shared arcs are fractional, they become integer. HiGHS then runs again.
4. Among plans of the lowest cost, the one of the lowest tie weight is chosen (`tiebreak`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import process_time

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import Basis, Problem
from autopar.solver.adapter import Answer, Highs, Outcome
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from autopar.solver.ilp import Model, build_model
from autopar.solver.paths import LARGEST_COST, PathFinder, any_path, forbid_above, largest_cost
from autopar.solver.relaxation import (
    DualBound,
    as_basis,
    as_start,
    check_agreement,
    cover,
    dive,
    dual_bound,
    express,
    least_cost,
    num_fractional,
    rounded,
    undercharged,
)
from autopar.solver.search import SAME_COST, Progress, Search
from autopar.solver.tiebreak import break_ties, restrict

MAX_CHOICES = 8_000
"""The most choices of one integer program, with flows: models on two axes have about 5,000."""

_MAX_ROUNDS = 500
_FEW_NODES = 200
WINDOWED_TOLERANCE = 1e-3
"""The gap, as a part, at which a plan of a problem with windows is good enough. The relaxation
splits choices among the resources of a window, as no plan can."""

_NEAR = (1 / 400, 1 / 100, 1 / 25)
"""Distances above the bound, as parts of it, within which plans are searched, one after the other.
For Llama-8B on 8 and on 64 devices, memory binding, a plan within 1/400 is 4 % and 1 % better than
those of dives, in a tenth of the time."""

_SUB_PROGRAMS = tuple(
    f"mip_heuristic_run_{kind}"
    for kind in ("rins", "rens", "root_reduced_cost", "feasibility_jump")
)
"""Heuristics of HiGHS that run at any setting of their effort. They took half of the time of branch
and bound or more (Llama-8B at 32x8: 40 of 62 s), and seldom found a better plan."""

_MAX_WINDOWED = 8_000
"""The most open columns, which better plans may use, for branch and bound with windows. With more,
and a plan within `_CLOSE` of the bound, as a part of it, that plan stays, with its gap."""
_CLOSE = 1 / 200

_FEW_SPLIT = 10
"""Up to so many split choices in the relaxation, with windows, branch and bound finds a plan sooner
than a dive. With 40, memory binding, it took 250 s (Llama-8B on 64x8 L4s) for a plan 0.4 % worse
than that of one dive, which took 6 s."""

_PATIENCE = 0.6
"""Steps of the simplex method per row after which the interior point method takes over, with
windows. If the relaxation has an integral optimum, the simplex method takes 0.2 to 0.55 steps per
row, else more than 1. The interior point method takes as long as 5 times as many steps, or more."""

_COLUMN_NS = 25_000
"""The work, per column, of stating a program and of descents from its relaxation."""

_TOLERANCE = 1e-6
"""The error of HiGHS's bound, in its own scale: its tolerance for feasibility and integrality."""


@dataclass(frozen=True, slots=True)
class Aim:
    """When a search ends, and which `paths` flows may take. By default it ends with the plan of the
    lowest cost and tie weight.

    With a `cutoff`, it ends when no plan can cost less than that. With a `tolerance`, it ends when
    the best plan's gap is at most that part of its cost, whatever its tie weight. With
    `max_iterations`, no linear program takes more steps of the simplex method, and branch and bound
    no more than `_FEW_NODES` nodes. With windows and `dives`, plans come of dives, and there is no
    large integer program. Relaxations go on from `start` where it fits. A `rough` search ends with
    the first plan if that is a few percent from the bound and the integer program is large. With a
    `known` plan, only better ones are searched, also by dives if it is within `_CLOSE` of the
    bound. No dive follows a relaxation that costs `hopeless` or more."""

    paths: PathFinder = any_path
    cutoff: float = inf
    tolerance: float = 0.0
    max_iterations: int | None = None
    dives: bool = False
    start: Basis | None = None
    rough: bool = False
    known: tuple[int, ...] = ()
    hopeless: float = inf


EXACT = Aim()


def find_exactly(problem: Problem, clock: Clock, progress: Progress, aim: Aim = EXACT) -> Search:
    """Solves `problem` as far as `aim` requires and the clock allows."""
    tolerance = max(aim.tolerance, WINDOWED_TOLERANCE) if problem.windows else aim.tolerance
    state = Search(
        problem, Evaluator(problem), clock, progress, cutoff=aim.cutoff, tolerance=tolerance
    )
    if aim.known:
        state.submit(aim.known, state.evaluator(aim.known))
    elif clock.limit_s is not None or largest_cost(problem) > LARGEST_COST:
        _descend(state, None)
    while True:
        if state.evaluation is not None:
            problem = forbid_above(problem, state.evaluation.objective)
        largest = largest_cost(problem)
        is_over = _solve(state, problem, aim) or clock.expired or largest <= LARGEST_COST
        if is_over or state.evaluation is None:
            return state
        if largest_cost(forbid_above(problem, state.evaluation.objective)) == largest:
            return state


def _solve(state: Search, problem: Problem, aim: Aim) -> bool:
    """All steps, on a `problem` that may forbid more than the one of `state`. Returns whether the
    search is over, or the rest is not worth its time."""
    started = process_time()
    model = build_model(problem, paths=aim.paths)
    state.clock.count(model.num_columns * _COLUMN_NS)
    state.raise_bound(least_cost(model))
    if any((columns < 0).all() for columns in model.choices):
        state.infeasible = True
        return True
    highs, answer = _relax(state, model, started, aim)
    duals = _read_relaxation(state, model, highs, answer, aim)
    if state.infeasible:
        return True
    is_enough = False
    if aim.rough and duals is not None and _is_far(state, duals):
        state.is_rough = True
        return True
    if not state.is_finished and answer.outcome is Outcome.OPTIMAL:
        is_enough = bool(model.windows and duals and _narrow(state, model, highs, duals, aim))
        if not is_enough:
            _solve_integer(state, model, highs, duals)
    if state.proven and not aim.tolerance and duals is not None and not state.clock.expired:
        break_ties(state, model, highs, duals)
    return is_enough or state.is_finished


def _descend(state: Search, start: tuple[int, ...] | None) -> None:
    descent = Descent(state.problem, state.evaluator, state.clock, state.shares)
    for choice in [start] if start else [descent.grown(), descent.smallest_memory()]:
        plan = descent.improve(choice)
        if plan is not None:
            state.submit(*plan)


def _relax(state: Search, model: Model, started: float, aim: Aim) -> tuple[Highs, Answer]:
    program = express(model)
    most = aim.max_iterations
    highs = Highs(
        {
            # Less than 1, the distance to the next cost, even with the bound's tolerance added.
            "mip_abs_gap": 0.5 * model.cost_scale,
            "mip_rel_gap": state.tolerance,
            # After dives, and on a small program, these heuristics only cost time.
            "mip_heuristic_effort": 0.0,
            "mip_allow_restart": False,
            **dict.fromkeys(_SUB_PROGRAMS, False),
            **({"mip_max_nodes": _FEW_NODES} if state.problem.windows else {}),
            **(
                {}
                if most is None
                else {"simplex_iteration_limit": most, "mip_max_nodes": _FEW_NODES}
            ),
        },
        state.clock,
    )
    built = process_time()
    patience = int(model.num_rows * _PATIENCE) if model.windows else None
    start = None if aim.start is None else as_start(model, aim.start)
    enough = inf if most is not None else _beaten_cost(aim) * model.cost_scale
    answer = highs.relax(program, patience, start, enough)
    is_over = most is not None or state.clock.expired or _is_beaten(model, answer, aim.cutoff)
    if answer.outcome is Outcome.LIMIT and not is_over:
        answer = highs.relax(program, patience, start)
    if answer.outcome is Outcome.OPTIMAL:
        state.basis = as_basis(model, highs.basis())
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


def _beaten_cost(aim: Aim) -> float:
    """The cost at which a relaxation may end early: no plan is below the cutoff then. The cutoff
    may be that of a plan less the tolerance, so the tolerance is added."""
    return aim.cutoff / (1 - aim.tolerance) * (1 + _TOLERANCE)


def _is_beaten(model: Model, answer: Answer, cutoff: float) -> bool:
    """Whether the duals of an unfinished relaxation prove that no plan costs less than `cutoff`."""
    duals = answer.row_duals / model.cost_scale
    return len(duals) > 0 and dual_bound(model, duals).value - SAME_COST > cutoff - 1


def _read_relaxation(
    state: Search, model: Model, highs: Highs, answer: Answer, aim: Aim
) -> DualBound | None:
    """Bound and first plans from the relaxation. None when it gave no duals."""
    started = process_time()
    if answer.outcome is Outcome.INFEASIBLE:
        _no_plan(state, inf, is_whole=True)
        return None
    if answer.outcome is Outcome.FAILED:
        raise SolverError(f"HiGHS failed on the relaxation: {answer.detail}")
    if not len(answer.row_duals):
        return None
    state.relaxation = model, answer.row_duals / model.cost_scale
    state.shares = model.shares(state.relaxation[1])
    state.byte_ns = model.byte_ns(state.relaxation[1])
    duals = dual_bound(model, state.relaxation[1])
    state.raise_bound(duals.value)
    if not answer.row_duals[[limit.row for limit in model.limits]].any():
        state.unlimited_bound = max(state.unlimited_bound, duals.value)
    if answer.outcome is not Outcome.OPTIMAL:
        return duals
    choice = rounded(model, answer.values)
    state.statistics["lp_fractional"] = num_split = num_fractional(model, answer.values)
    state.submit(choice, state.evaluator(choice))
    if model.windows and not state.is_finished:
        _descend(state, choice if aim.known else state.choice or choice)
    if not state.is_finished and duals.value < aim.hopeless:
        is_thorough = _dives(state, duals, aim) or not model.windows
        if is_thorough or num_split > _FEW_SPLIT:
            dive(state, model, highs, answer.values, once=not is_thorough)
    if not model.windows and not state.is_finished:
        _descend(state, state.choice or choice)
    state.statistics["dive_cpu_s"] = process_time() - started
    return duals


def _narrow(state: Search, model: Model, highs: Highs, duals: DualBound, aim: Aim) -> bool:
    """Searches plans near the bound, unless dives did. Returns whether the result is good enough,
    or more is not worth its time."""
    near, searched = [part * duals.value for part in _NEAR], 0.0
    is_far = is_over = False
    for room in () if _dives(state, duals, aim) else near:
        if _room(state, duals) > room:
            is_best, searched = _solve_integer(state, model, highs, duals, room), room
            is_far = is_best and _room(state, duals) > near[-1]
            highs.free()
        is_over = _is_enough(state, duals, aim, searched, is_far=is_far) or state.clock.expired
        if is_over or _room(state, duals) <= room:
            break
    return is_over or _is_enough(state, duals, aim, is_far=is_far)


def _is_enough(
    state: Search, duals: DualBound, aim: Aim, searched: float = 0.0, *, is_far: bool
) -> bool:
    """Whether the search is over. If the best plan near the bound still `is_far` from it, the gap
    comes of choices that resources share in the relaxation: branch and bound would not end. A plan
    whose gap is within the distance above the bound that was `searched` is enough as well: a wider
    search takes several times as long."""
    if state.is_finished or state.evaluation is None:
        return state.is_finished
    is_slow = _num_open(state, duals) > _MAX_WINDOWED
    enough = max(_CLOSE * duals.value, searched)
    return is_slow and (aim.dives or is_far or state.gap <= enough)


def _dives(state: Search, duals: DualBound, aim: Aim) -> bool:
    """Whether plans come of dives: also if a known plan is near the bound, as branch and bound
    would take long to find a better one."""
    return aim.dives or (bool(aim.known) and state.gap <= _CLOSE * duals.value)


def _cutoff(state: Search, duals: DualBound | None) -> float:
    """The cost that a plan must be below to be searched, with windows: that of the best plan, less
    the tolerance in a large program."""
    if not state.problem.windows:
        return inf
    is_slow = duals is not None and _num_open(state, duals) > _MAX_WINDOWED
    return state.cost * (1 - state.tolerance) if is_slow else state.cost


def _num_open(state: Search, duals: DualBound) -> int:
    """The number of columns that plans better than the best one may use."""
    return int((np.abs(duals.reduced_costs) <= _room(state, duals)).sum())


def _is_far(state: Search, duals: DualBound) -> bool:
    """Whether the best plan is near the bound, but not within `_CLOSE` of it, and many columns are
    open."""
    if not state.problem.windows or state.evaluation is None or state.is_finished:
        return False
    is_near = _CLOSE * duals.value < state.gap <= _NEAR[-1] * duals.value
    return is_near and _num_open(state, duals) > _MAX_WINDOWED


def _room(state: Search, duals: DualBound) -> float:
    """The cost of the best plan above the bound of the relaxation."""
    return state.cost - duals.value + SAME_COST


def _solve_integer(
    state: Search,
    model: Model,
    highs: Highs,
    duals: DualBound | None,
    room: float = inf,
) -> bool:
    """Searches the best plan among those that cost at most `room` more than the relaxation, and
    others that use the same columns. Returns whether that plan is known. With windows, only plans
    better than the best so far by more than the tolerance count."""
    started = process_time()
    most, is_whole, is_best, cutoff = inf, True, False, _cutoff(state, duals)
    if duals is not None:
        left = min(_room(state, duals), max(0.0, cutoff - duals.value))
        is_whole = left <= room
        room = min(left, room)
        most = duals.value + room
        if room < inf:
            restrict(highs, model, duals, room)
    extra = np.empty(0, dtype=np.int64)
    for _ in range(_MAX_ROUNDS):
        answer = highs.solve_integer(extra, cutoff * model.cost_scale)
        state.statistics["nodes"] = int(state.statistics["nodes"]) + answer.num_nodes
        if answer.outcome is Outcome.INFEASIBLE:
            is_best = cutoff < inf
            least = min(most, cutoff - _TOLERANCE / model.cost_scale)
            _no_plan(state, least, is_whole=is_whole and not is_best)
            break
        if answer.outcome is Outcome.FAILED and state.evaluation is None:
            raise SolverError(f"HiGHS failed on the integer program: {answer.detail}")
        # Plans with columns that were taken out cost more than the best plan.
        bound = (answer.bound - _TOLERANCE) / model.cost_scale
        state.raise_bound(min(bound, most, state.cost))
        if not len(answer.values):
            break
        is_best = answer.outcome is Outcome.OPTIMAL
        choice = rounded(model, answer.values)
        evaluation = state.evaluator(choice)
        state.submit(choice, evaluation)
        if state.is_finished or answer.outcome is not Outcome.OPTIMAL:
            break
        if not evaluation.feasible:
            highs.add_limit(*cover(state.problem, model, choice, evaluation))
            continue
        fractional = undercharged(model, answer.values, evaluation, extra)
        if not len(fractional):
            check_agreement(state, evaluation, answer.objective / model.cost_scale)
            break
        extra = np.union1d(extra, fractional)
    took = float(state.statistics.get("mip_cpu_s", 0.0)) + process_time() - started
    state.statistics["mip_cpu_s"] = took
    return is_best


def _no_plan(state: Search, most: float, *, is_whole: bool) -> None:
    """Records HiGHS's answer that the columns left have no plan: none costs `most` or less."""
    if not is_whole:
        state.raise_bound(most)
        return
    state.infeasible = state.evaluation is None
    if not state.infeasible:
        state.statistics["fault"] = "HiGHS calls a problem infeasible that has a plan"
