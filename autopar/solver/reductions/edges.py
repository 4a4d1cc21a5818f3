"""Fewer edges: parallel ones added up, those that depend on one node made part of its costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.ir.problem import FORBIDDEN, Edge, IntArray, Problem


def merge_edges(
    problem: Problem,
) -> tuple[Problem, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """At most one edge per pair of nodes, none from a node to itself or to a node with one choice.

    Costs stay as they are in sum. Where a sum of allowed costs would read as `FORBIDDEN`, the edge
    is left alone.
    """
    costs = list(problem.costs)
    merged: dict[tuple[int, int], Edge] = {}
    left: list[Edge] = []
    for edge in problem.edges:
        node, own = _depends_on_one(edge)
        if node is not None:
            total = _plus(costs[node], own)
            if total is None:
                left.append(edge)
            else:
                costs[node] = total
            continue
        if edge.source > edge.target:
            edge = Edge(edge.target, edge.source, edge.cost.T)
        pair = (edge.source, edge.target)
        total = _plus(merged[pair].cost, edge.cost) if pair in merged else edge.cost
        if total is None:
            left.append(edge)
        else:
            merged[pair] = replace(edge, cost=total)
    edges = (*(e for e in merged.values() if e.cost.any()), *left)
    return replace(problem, costs=tuple(costs), edges=edges), lambda choice: choice


def _depends_on_one(edge: Edge) -> tuple[int | None, IntArray]:
    """The one node whose choice decides what the edge costs, and that cost per choice."""
    if edge.source == edge.target:
        return edge.source, np.diagonal(edge.cost)
    if edge.cost.shape[1] == 1:
        return edge.source, edge.cost[:, 0]
    if edge.cost.shape[0] == 1:
        return edge.target, edge.cost[0]
    return None, edge.cost


def _plus(a: IntArray, b: IntArray) -> IntArray | None:
    """The sum, `FORBIDDEN` where either is; None when an allowed sum is that large."""
    forbidden = (a >= FORBIDDEN) | (b >= FORBIDDEN)
    total = np.where(forbidden, 0, a) + np.where(forbidden, 0, b)
    if (total >= FORBIDDEN).any():
        return None
    return np.where(forbidden, FORBIDDEN, total)
