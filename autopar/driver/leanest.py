"""The leanest plan on a mesh, found without a search: which choices hold least is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.compile import Say, best_on
from autopar.cost_model.price import price
from autopar.driver.infeasible_subset import BOUNDLESS_BYTES
from autopar.errors import InfeasibleError
from autopar.ir.choices import Choice, ParamChoice, Saved
from autopar.ir.problem import FORBIDDEN, IntArray, Label, Problem
from autopar.plans.fitting import Candidate
from autopar.plans.request import PlanRequest
from autopar.solver.memory import total_usages


def leanest(request: PlanRequest, say: Say, stated: Problem | None = None) -> Candidate:
    """The best of the plans that hold least when forward ends, whatever their peak; if those have
    more on the host than their share, of the plans with nothing there. `stated` is the problem that
    is open about what is made again, if there is one already. InfeasibleError if what is imposed,
    or the host, leaves no plan at all."""
    request = request.opened().within(BOUNDLESS_BYTES)
    problem = replace(stated or price(request), usage_limit=None)
    try:
        return best_on(request, say, None, _leanest_of(problem))
    except InfeasibleError:
        on_device = _on_device(problem)
        if on_device is problem:
            raise
        return best_on(request, say, None, _leanest_of(on_device))


def _on_device(problem: Problem) -> Problem:
    """`problem` with nothing on the host; itself where nothing might be, or something has to be."""
    is_hosted = [np.array([_is_hosted(label) for label in labels]) for labels in problem.labels]
    if not any(map(np.any, is_hosted)) or any(map(np.all, is_hosted)):
        return problem
    pairs = zip(problem.costs, is_hosted, strict=True)
    costs = tuple(np.where(hosted, FORBIDDEN, cost) for cost, hosted in pairs)
    return replace(problem, costs=costs)


def _is_hosted(label: Label) -> bool:
    match label:
        case Saved():
            return label.offloaded
        case ParamChoice():
            return bool(label.hosted)
        case _:
            return False


def _leanest_of(problem: Problem) -> Problem:
    triples = zip(problem.costs, total_usages(problem), problem.labels, strict=True)
    return replace(problem, costs=tuple(_only_leanest(*each) for each in triples))


def _only_leanest(costs: IntArray, sizes: IntArray, labels: Sequence[Label]) -> IntArray:
    """The costs of a node with all forbidden but what holds least. What copies alone read is saved,
    since nothing could be made again without it."""
    is_copy = any(isinstance(label, Choice) for label in labels)
    is_open = (costs < FORBIDDEN) & np.array([is_copy or label != Saved() for label in labels])
    return np.where(is_open & (sizes == sizes[is_open].min(initial=FORBIDDEN)), costs, FORBIDDEN)
