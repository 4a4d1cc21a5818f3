"""Memory that cannot exceed the limit: usages that matter at no time.

A time at which even the largest choices together keep the limit says nothing about a plan, and a
usage that is live at such times only is as good as none. What takes no memory can be eliminated
(`contract`), and is no burden to prices.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from autopar.ir.problem import Problem
from autopar.solver.memory import maximal_times


def without_slack(problem: Problem) -> Problem:
    """`problem` with the usages alone that are live at a time that some plan could overfill.

    Exact: the same plans keep the limit, and cost the same.
    """
    if problem.usage_limit is None:
        return problem
    times = maximal_times(problem)
    spans = [
        [np.searchsorted(times, (usage.start, usage.stop)).tolist() for usage in usages]
        for usages in problem.usages
    ]
    change = [0] * (len(times) + 1)
    for usages, placed in zip(problem.usages, spans, strict=True):
        for usage, (start, stop) in zip(usages, placed, strict=True):
            if start < stop:
                most = int(usage.amounts.max())
                change[start] += most
                change[stop] -= most
    limits = map(problem.limit_at, times.tolist())
    tight = [used > limit for used, limit in zip(accumulate(change[:-1]), limits, strict=True)]
    before = list(accumulate(tight, initial=0))
    kept = tuple(
        tuple(
            usage
            for usage, (start, stop) in zip(usages, placed, strict=True)
            if start < stop and before[stop] > before[start]
        )
        for usages, placed in zip(problem.usages, spans, strict=True)
    )
    return replace(problem, usages=kept)
