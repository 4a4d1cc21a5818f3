"""The leanest plan on a mesh, found without a search: which choices hold least is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.compile import Say, best_on
from autopar.cost_model.price import price
from autopar.driver.infeasible_subset import BOUNDLESS_BYTES
from autopar.ir.problem import FORBIDDEN, Problem
from autopar.plans.fitting import Candidate
from autopar.plans.request import PlanRequest
from autopar.solver.memory import total_usages


def leanest(request: PlanRequest, say: Say, stated: Problem | None = None) -> Candidate:
    """The best of the plans that hold least when forward ends, whatever their peak; `stated` is the
    problem that is open about what is made again, if there is one already. InfeasibleError if what
    is imposed leaves no plan at all."""
    request = replace(request, again=None).within(BOUNDLESS_BYTES)
    problem = stated or price(request)
    costs = [
        np.where(size == size[cost < FORBIDDEN].min(initial=FORBIDDEN), cost, FORBIDDEN)
        for cost, size in zip(problem.costs, total_usages(problem), strict=True)
    ]
    return best_on(request, say, None, replace(problem, costs=tuple(costs), usage_limit=None))
