"""The leanest plan on a mesh, found without a search: which choices hold least is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.compile import Say, best_on
from autopar.cost_model.price import price
from autopar.driver.infeasible_subset import BOUNDLESS_BYTES
from autopar.ir.choices import Choice, Saved
from autopar.ir.problem import FORBIDDEN, IntArray, Label, Problem
from autopar.plans.fitting import Candidate
from autopar.plans.request import PlanRequest
from autopar.solver.memory import total_usages


def leanest(request: PlanRequest, say: Say, stated: Problem | None = None) -> Candidate:
    """The best of the plans that hold least when forward ends, whatever their peak; `stated` is the
    problem that is open about what is made again, if there is one already. InfeasibleError if what
    is imposed leaves no plan at all."""
    request = request.opened().within(BOUNDLESS_BYTES)
    problem = stated or price(request)
    costs = [
        _only_leanest(cost, size, labels)
        for cost, size, labels in zip(
            problem.costs, total_usages(problem), problem.labels, strict=True
        )
    ]
    return best_on(request, say, None, replace(problem, costs=tuple(costs), usage_limit=None))


def _only_leanest(costs: IntArray, sizes: IntArray, labels: Sequence[Label]) -> IntArray:
    """The costs of a node with all forbidden but what holds least. What copies alone read is saved,
    since nothing could be made again without it."""
    is_copy = any(isinstance(label, Choice) for label in labels)
    is_open = (costs < FORBIDDEN) & np.array([is_copy or label != Saved() for label in labels])
    return np.where(is_open & (sizes == sizes[is_open].min(initial=FORBIDDEN)), costs, FORBIDDEN)
