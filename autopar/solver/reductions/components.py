"""Splits a problem into parts that have nothing to do with one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.problem import Problem
from autopar.solver.memory import live_sets

Join = Callable[[Sequence[tuple[int, ...]]], tuple[int, ...]]


def split_components(problem: Problem) -> tuple[tuple[Problem, ...], Join]:
    """The parts, in order of their first nodes, and what joins their choices to one of `problem`.

    Nodes are in one part when an edge or a flow ties them, or when they are live together at a time
    at which their largest choices would exceed the limit. Exact: costs add up, and a limit that no
    choice of a part's nodes can break needs no watching.
    """
    groups = _groups(problem)
    parts = tuple(_part(problem, group) for group in groups)

    def join(choices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        full = [0] * len(problem.keys)
        for group, choice in zip(groups, choices, strict=True):
            for node, c in zip(group, choice, strict=True):
                full[node] = c
        return tuple(full)

    return parts, join


def _groups(problem: Problem) -> list[list[int]]:
    parent = list(range(len(problem.keys)))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    tied = [(edge.source, edge.target) for edge in problem.edges]
    tied += [(flow.source, sink.node) for flow in problem.flows for sink in flow.sinks]
    for nodes in _crowded(problem):
        tied += [(nodes[0], node) for node in nodes[1:]]
    for a, b in tied:
        first, second = sorted((find(a), find(b)))
        parent[second] = first
    groups: dict[int, list[int]] = {}
    for node in range(len(parent)):
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _crowded(problem: Problem) -> list[tuple[int, ...]]:
    """The maximal live sets that can break the limit."""
    if problem.usage_limit is None:
        return []
    most = [int(usages.max()) for usages in problem.usages]
    sets = (nodes for _, nodes in live_sets(problem))
    return [nodes for nodes in sets if sum(most[i] for i in nodes) > problem.usage_limit]


def _part(problem: Problem, group: list[int]) -> Problem:
    place = {node: at for at, node in enumerate(group)}
    return replace(
        problem,
        keys=tuple(problem.keys[i] for i in group),
        labels=tuple(problem.labels[i] for i in group),
        costs=tuple(problem.costs[i] for i in group),
        usages=tuple(problem.usages[i] for i in group),
        intervals=tuple(problem.intervals[i] for i in group),
        edges=tuple(
            replace(e, source=place[e.source], target=place[e.target])
            for e in problem.edges
            if e.source in place
        ),
        flows=tuple(
            replace(
                flow,
                source=place[flow.source],
                sinks=tuple(replace(s, node=place[s.node]) for s in flow.sinks),
            )
            for flow in problem.flows
            if flow.source in place
        ),
    )
