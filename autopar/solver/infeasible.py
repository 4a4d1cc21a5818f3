"""Why a problem has no plan: the memory limit and the least that is needed, or the choices."""

from __future__ import annotations

from autopar.problem import FORBIDDEN, Conflict, Problem
from autopar.solver.adapter import Highs, Outcome
from autopar.solver.dive import rounded
from autopar.solver.evaluate import peak_usage
from autopar.solver.express import express
from autopar.solver.ilp import build
from autopar.solver.memory import peak_conflict
from autopar.solver.search import Clock


def explain(problem: Problem, clock: Clock) -> tuple[Conflict | None, str]:
    """The conflict, when memory is the reason, and the reason in words.

    The smallest peak of any allowed plan is found by an integer program of its own; `needed` is
    that peak, and so the smallest limit that would do. When the clock ends that search early,
    `needed` is the peak of the best plan found, which may be more than the least.
    """
    for key, costs in zip(problem.keys, problem.costs, strict=True):
        if (costs >= FORBIDDEN).all():
            return None, f"every choice of node {key} is forbidden"
    if problem.usage_limit is not None:
        model = build(problem, excess=True)
        highs = Highs({"mip_feasibility_tolerance": 1e-9})
        highs.limit_time(clock.left_s())
        highs.relax(express(model))
        highs.limit_time(clock.left_s())
        answer = highs.solve_integer()
        if len(answer.values):
            choice = rounded(model, answer.values)
            peak, time = peak_usage(problem, choice)
            proven = answer.outcome is Outcome.OPTIMAL
            least = f"the leanest plan {'' if proven else 'found in time '}needs {peak}"
            reason = f"{least} at time {time}, the limit is {problem.usage_limit}"
            return peak_conflict(problem, choice, time, peak), reason
        if answer.outcome is not Outcome.INFEASIBLE:
            return None, "no plan was found that is allowed, whatever memory it takes"
    return None, "no combination of choices is allowed, whatever memory it takes"
