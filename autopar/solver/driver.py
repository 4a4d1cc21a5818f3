"""From a problem to a solution: check, put in order, search, and evaluate again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import Basis, Flow, Problem, Solution, Status
from autopar.solver.adapter import SOLVER
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluator, evaluate
from autopar.solver.exact import MAX_CHOICES, Aim, find_exactly
from autopar.solver.infeasible import explain_conflict, infeasible_solution
from autopar.solver.memory import least_usage_conflict
from autopar.solver.search import Progress, Search, least_whole, silent
from autopar.solver.windows import renumbered

# Nodes, edges and flows in an order that does not depend on how the problem was put together.


def in_canonical_order(
    problem: Problem,
) -> tuple[Problem, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Nodes sorted by key, edges by their ends, flows by key; what has equal keys stays in order.

    HiGHS's path through a problem, and so the time it takes, depends on the order of columns.
    """
    order = sorted(range(len(problem.keys)), key=lambda i: problem.keys[i])
    place = {node: at for at, node in enumerate(order)}
    edges = [replace(e, source=place[e.source], target=place[e.target]) for e in problem.edges]
    by_key = sorted(
        range(len(problem.flows)),
        key=lambda f: (problem.flows[f].key, place[problem.flows[f].source]),
    )
    flows = [_in_order(problem.flows[f], place) for f in by_key]
    ordered = replace(
        problem,
        keys=tuple(problem.keys[i] for i in order),
        labels=tuple(problem.labels[i] for i in order),
        costs=tuple(problem.costs[i] for i in order),
        usages=tuple(problem.usages[i] for i in order),
        edges=tuple(sorted(edges, key=lambda e: (e.source, e.target, e.cost.tobytes()))),
        flows=tuple(flows),
        windows=renumbered(problem.windows, place, {f: at for at, f in enumerate(by_key)}),
    )
    return ordered, lambda choice: tuple(choice[place[i]] for i in range(len(order)))


def _in_order(flow: Flow, place: dict[int, int]) -> Flow:
    moved = (replace(sink, node=place[sink.node]) for sink in flow.sinks)
    sinks = sorted(moved, key=lambda sink: (sink.node, sink.state.tobytes()))
    return replace(flow, source=place[flow.source], sinks=tuple(sinks))


MAX_ENTRIES = 20_000
"""Entries in the tables of edges that the integer program takes."""

_COARSE = 0.02
_FEW_CHOICES = 2_000
"""Plans of problems with windows and more choices are found by column generation where there is no
limit on memory, or no start and a tolerance that is `_COARSE`: there part of the problem shows
within a second or so how good a plan is, and the whole takes three to twenty times as long. Where
memory binds, plans without it rule out little, and a relaxation that goes on from another is
faster, with dives after it where the tolerance is `_COARSE`."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    cutoff: int | None = None,
    max_iterations: int | None = None,
    start: Basis | None = None,
    tolerance: float = 0.0,
    rough: bool = False,
) -> Solution:
    """The cheapest plan of `problem`, with what is proven about it.

    Without `time_limit_s` the answer depends on the problem alone and is `OPTIMAL`, `INFEASIBLE`
    or, with windows or beyond `MAX_CHOICES` or `MAX_ENTRIES`, `FEASIBLE` with its bound. With
    it, the best plan in hand when the time is up is `FEASIBLE`, and `LIMIT` says that there is
    none. Ties go to the lowest tie weight (`ties`). `progress` is told of new plans and bounds.
    SolverError: the problem is malformed, or HiGHS failed or contradicts the evaluation.

    With `max_iterations`, steps of the simplex method in each linear program, the work is limited
    without a clock, on problems of one integer program; the answer is then as with a time limit.

    `start` is the basis of the solution of a problem that has much in common with this one, best
    all but its limits, from which a relaxation goes on; of any other, it is of no use.

    With a `tolerance` the answer is the first plan that is known to cost no more than another by
    more than such a part. Where that is `_COARSE`, a plan whose gap does not close soon is the
    answer with that gap.

    What is to be `rough` may be the first plan that there is, which `is_rough` then, where more of
    the search would take long: of windows and many choices.

    Where no plan costs less than `cutoff`, the answer may be `BEATEN`, with a bound that says so.

    `statistics` holds the size of the program as HiGHS got it, CPU seconds by phase, branch and
    bound nodes, `reason` when infeasible, and `fault` when HiGHS said something that is not so.
    """
    aim = Aim(max_iterations=max_iterations, start=start, tolerance=tolerance, rough=rough)
    _check(problem)
    if time_limit_s is not None:
        get_ready(problem, by_columns=_takes_columns(problem, cutoff, aim))
    clock = Clock(time_limit_s)
    conflict = least_usage_conflict(problem)
    if conflict is not None:
        reason = f"the smallest choices alone need {conflict.needed} at time {conflict.time}"
        return infeasible_solution({}, conflict, reason)
    if is_large(problem):
        from autopar.solver.message_passing.path import search_large

        return search_large(problem, clock, progress or silent)
    ordered, lift = in_canonical_order(problem)
    state = _search(ordered, clock, progress or silent, cutoff, aim)
    if state.infeasible:
        return infeasible_solution(state.statistics, *explain_conflict(problem, clock))
    if state.beaten or state.evaluation is None:
        return Solution(
            Status.BEATEN if state.beaten else Status.LIMIT,
            bound=least_whole(state.bound),
            solver=SOLVER,
            statistics=state.statistics,
            is_limiting=state.is_limiting,
        )
    return _finish(problem, state, lift(state.choice))


def get_ready(problem: Problem, *, by_columns: bool = False) -> None:
    """Compiles the loops that solving `problem` takes, `by_columns` or because it is large, or
    reads them from their cache: no limit of time is for that."""
    if not (by_columns or is_large(problem)):
        return
    # numba takes a moment to import, and a single problem on one or two axes does not need it.
    from autopar.solver.loops import ready_column_generation
    from autopar.solver.message_passing.path import ready_message_passing

    if is_large(problem):
        ready_message_passing()
    else:
        ready_column_generation()


def _is_in_parts(problem: Problem, aim: Aim) -> bool:
    """Whether column generation solves `problem`, and no integer program of all of it."""
    count = sum(map(len, problem.costs))
    in_parts = bool(problem.windows) and count > _FEW_CHOICES and aim.max_iterations is None
    is_free = problem.usage_limit is None and aim.start is None
    return count > MAX_CHOICES or (in_parts and is_free)


def _takes_columns(problem: Problem, cutoff: int | None, aim: Aim) -> bool:
    """Whether column generation has a part in solving it: also its bound, against a cutoff. A
    relaxation that goes on from another takes no longer than a bound without one."""
    return _is_in_parts(problem, aim) or (cutoff is not None and aim.start is None)


def _search(
    problem: Problem,
    clock: Clock,
    progress: Progress,
    cutoff: int | None,
    aim: Aim,
) -> Search:
    least = inf if cutoff is None else cutoff
    if not _takes_columns(problem, cutoff, aim):
        is_coarse = aim.tolerance >= _COARSE
        return find_exactly(problem, clock, progress, replace(aim, cutoff=least, dives=is_coarse))
    # numba takes a moment to import, and a single problem on one or two axes does not need it.
    from autopar.solver.column_generation.path import generate_columns, quick_bound

    if _is_in_parts(problem, aim):
        return generate_columns(problem, clock, progress, least, aim.tolerance)
    assert cutoff is not None
    bound = quick_bound(problem, clock, cutoff)
    if bound >= cutoff:
        evaluator = Evaluator(problem)
        return Search(
            problem, evaluator, clock, progress, bound, unlimited_bound=bound, cutoff=cutoff
        )
    return find_exactly(problem, clock, progress, replace(aim, cutoff=cutoff))


def is_large(problem: Problem) -> bool:
    """Whether `problem` goes to message passing: no flows, and tables beyond an integer program."""
    return not problem.flows and sum(edge.cost.size for edge in problem.edges) > MAX_ENTRIES


def _finish(problem: Problem, state: Search, choice: tuple[int, ...]) -> Solution:
    final = evaluate(problem, choice)
    assert state.evaluation is not None
    if not final.feasible or final.objective != state.evaluation.objective:
        raise SolverError(
            f"problem {problem.name}: the plan costs {state.evaluation.objective} as it was "
            f"ordered and {final.objective} as it was stated {final.violation}".rstrip()
        )
    bound = min(least_whole(state.bound), final.objective)
    proven = final.objective == bound
    return Solution(
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        choice=choice,
        arcs=final.arcs,
        objective=final.objective,
        bound=bound,
        solver=SOLVER,
        statistics=state.statistics,
        basis=state.basis,
        byte_ns=state.byte_ns,
        is_rough=state.is_rough,
        is_limiting=state.is_limiting,
    )


def _check(problem: Problem) -> None:
    """SolverError: an index is out of range, shapes do not match, an arc costs less than 0."""
    counts = [len(costs) for costs in problem.costs]
    for edge in problem.edges:
        if edge.cost.shape != (counts[edge.source], counts[edge.target]):
            raise SolverError(
                f"problem {problem.name}: the edge from {problem.keys[edge.source]} to "
                f"{problem.keys[edge.target]} has costs of shape {edge.cost.shape}"
            )
    for flow in problem.flows:
        where = f"problem {problem.name}: flow {flow.key}"
        size = len(flow.states)
        sides = [(flow.source, flow.source_state), *((s.node, s.state) for s in flow.sinks)]
        if any(len(states) != counts[node] for node, states in sides):
            raise SolverError(f"{where} does not give a state per choice")
        if any(len(states) and (states.min() < -1 or states.max() >= size) for _, states in sides):
            raise SolverError(f"{where} names a state that it does not have")
        if not len(flow.tails) == len(flow.heads) == len(flow.costs):
            raise SolverError(f"{where} has ragged arcs")
        ends = np.concatenate([flow.tails, flow.heads])
        if len(ends) and (ends.min() < 0 or ends.max() >= size or flow.costs.min() < 0):
            raise SolverError(f"{where} has an arc with a state or a cost that is out of range")
