"""A problem with fewer choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.problem import IntArray, Problem


def keep_choices(problem: Problem, kept: Sequence[IntArray]) -> Problem:
    """`problem` with the choices `kept[i]` of every node, in that order."""
    return replace(
        problem,
        labels=tuple(
            tuple(labels[int(c)] for c in some)
            for labels, some in zip(problem.labels, kept, strict=True)
        ),
        costs=tuple(costs[some] for costs, some in zip(problem.costs, kept, strict=True)),
        usages=tuple(usages[some] for usages, some in zip(problem.usages, kept, strict=True)),
        edges=tuple(
            replace(e, cost=e.cost[np.ix_(kept[e.source], kept[e.target])]) for e in problem.edges
        ),
        flows=tuple(
            replace(
                flow,
                source_state=flow.source_state[kept[flow.source]],
                sinks=tuple(replace(s, state=s.state[kept[s.node]]) for s in flow.sinks),
            )
            for flow in problem.flows
        ),
    )
