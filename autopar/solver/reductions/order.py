"""Nodes, edges and flows in an order that does not depend on how the problem was put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.problem import Problem


def in_canonical_order(
    problem: Problem,
) -> tuple[Problem, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Nodes sorted by key, edges by their ends, flows by key; what has equal keys stays in order.

    HiGHS's path through a problem, and so the time it takes, depends on the order of columns.
    """
    order = sorted(range(len(problem.keys)), key=lambda i: problem.keys[i])
    place = {node: at for at, node in enumerate(order)}
    edges = [replace(e, source=place[e.source], target=place[e.target]) for e in problem.edges]
    flows = [
        replace(
            flow,
            source=place[flow.source],
            sinks=tuple(
                sorted(
                    (replace(sink, node=place[sink.node]) for sink in flow.sinks),
                    key=lambda sink: (sink.node, sink.state.tobytes()),
                )
            ),
        )
        for flow in problem.flows
    ]
    ordered = replace(
        problem,
        keys=tuple(problem.keys[i] for i in order),
        labels=tuple(problem.labels[i] for i in order),
        costs=tuple(problem.costs[i] for i in order),
        usages=tuple(problem.usages[i] for i in order),
        intervals=tuple(problem.intervals[i] for i in order),
        edges=tuple(sorted(edges, key=lambda e: (e.source, e.target, e.cost.tobytes()))),
        flows=tuple(sorted(flows, key=lambda flow: (flow.key, flow.source))),
    )
    return ordered, lambda choice: tuple(choice[place[i]] for i in range(len(order)))
