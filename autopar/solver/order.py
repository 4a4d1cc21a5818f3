"""Nodes, edges and flows in an order that does not depend on how the problem was put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.problem import Flow, Problem
from autopar.solver.windows import renumbered


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
