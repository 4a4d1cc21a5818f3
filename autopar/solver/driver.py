"""From a problem to a solution: check, order, search, and evaluate."""

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

# Nodes, edges and flows in an order that does not depend on how the problem was built.


def in_canonical_order(
    problem: Problem,
) -> tuple[Problem, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Nodes sorted by key, edges by their ends, flows by key; equal keys stay in order.

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
"""The most entries in the tables of edges of one integer program."""

_COARSE = 0.02
_FEW_CHOICES = 2_000
"""Problems with windows and more choices go to column generation if they have neither a memory
limit nor a start. There a part of the problem shows within a second or so how good a plan is, and
the whole takes 3 to 20 times as long. Where memory binds, plans without the limit rule out little.
A relaxation that goes on from a start is faster, with dives after it if the tolerance is at least
`_COARSE`."""


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
    it, the best plan when the time is up is `FEASIBLE`, and `LIMIT` says that there is none. Ties
    go to the lowest tie weight (`tiebreak`). `progress` is called for new plans and bounds.
    SolverError: the problem is malformed, or HiGHS failed or contradicts the evaluation.

    `max_iterations` limits the steps of the simplex method in each linear program, and so the work
    without a clock, on problems of one integer program. The solution is then as with a time limit.

    `start` is the basis of the solution of a similar problem, best one that differs only in its
    limits. The relaxation goes on from it. A basis of another problem is of no use.

    With a `tolerance`, the solution is the first plan whose gap is at most that part of its cost.
    If the tolerance is at least `_COARSE`, a plan whose gap does not close soon is returned with
    that gap.

    With `rough`, the solution may be the first plan if the rest of the search would take long, as
    with windows and many choices. It `is_rough` then.

    If no plan costs less than `cutoff`, the solution may be `BEATEN`, with a bound that proves it.

    `statistics` has the size of the program as HiGHS got it, CPU seconds by phase, branch and bound
    nodes, and `work_ns` (`Clock.work_ns`). It has a `reason` when infeasible, and a `fault` when
    HiGHS reported something that is wrong.
    """
    aim = Aim(max_iterations=max_iterations, start=start, tolerance=tolerance, rough=rough)
    _check(problem)
    if time_limit_s is not None:
        get_ready(problem, by_columns=_takes_columns(problem, cutoff, aim))
    clock = Clock(time_limit_s)
    solution = _solved(problem, clock, progress or silent, cutoff, aim)
    solution.statistics["work_ns"] = clock.work_ns
    return solution


def _solved(
    problem: Problem, clock: Clock, progress: Progress, cutoff: int | None, aim: Aim
) -> Solution:
    conflict = least_usage_conflict(problem)
    if conflict is not None:
        reason = f"the smallest choices alone need {conflict.needed} at time {conflict.time}"
        return infeasible_solution({}, conflict, reason)
    if is_large(problem):
        from autopar.solver.message_passing.path import search_large

        return search_large(problem, clock, progress)
    ordered, lift = in_canonical_order(problem)
    state = _search(ordered, clock, progress, cutoff, aim)
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
    """Compiles the loops for solving `problem`, `by_columns` or because it is large, or reads them
    from their cache. That is no part of the time limit."""
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
    """Whether column generation solves `problem`, not one integer program."""
    count = sum(map(len, problem.costs))
    in_parts = bool(problem.windows) and count > _FEW_CHOICES and aim.max_iterations is None
    is_free = problem.usage_limit is None and aim.start is None
    return count > MAX_CHOICES or (in_parts and is_free)


def _takes_columns(problem: Problem, cutoff: int | None, aim: Aim) -> bool:
    """Whether column generation solves `problem`, or only bounds it against a cutoff. With a start,
    a relaxation takes no longer than such a bound."""
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
        return generate_columns(problem, clock, progress, least, aim.tolerance, rough=aim.rough)
    assert cutoff is not None
    bound = quick_bound(problem, clock, cutoff)
    if bound >= cutoff:
        evaluator = Evaluator(problem)
        return Search(
            problem, evaluator, clock, progress, bound, unlimited_bound=bound, cutoff=cutoff
        )
    return find_exactly(problem, clock, progress, replace(aim, cutoff=cutoff))


def is_large(problem: Problem) -> bool:
    """Whether message passing solves `problem`: no flows, and tables of over `MAX_ENTRIES`."""
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
