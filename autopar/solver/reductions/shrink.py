"""Reductions that take nodes out of a problem without flows; both are exact.

They are `contract` within what a `Problem` can say: a node has one interval of memory, so a node
that takes memory can only become part of one with the same interval. Ties may be broken otherwise
than in the problem as it was: of equal plans, any may be the one that is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.ir.problem import Edge, IntArray, Problem
from autopar.solver.reductions.contract import Contracted, Scope, contract, takes_memory

Lift = Callable[[tuple[int, ...]], tuple[int, ...]]


def inline_chains(problem: Problem) -> tuple[Problem, Lift]:
    """Nodes whose choice a neighbour's decides become part of it: chains of unary ops, and all
    others where a table leaves one choice per choice of the other node."""
    return _restate(problem, contract(problem, Scope.SAME_MEMORY, eliminate=False))


def eliminate_low_degree(problem: Problem) -> tuple[Problem, Lift]:
    """Nodes without memory and with at most two neighbours take the cheapest choice for each of
    theirs. Three neighbours would leave a cost of three choices, which a `Problem` cannot say."""
    return _restate(problem, contract(problem, Scope.SAME_MEMORY, follow=False))


def _restate(problem: Problem, contracted: Contracted) -> tuple[Problem, Lift]:
    if problem.flows or not contracted.possible:
        return problem, lambda choice: choice
    nodes = contracted.nodes
    if not nodes:
        full = contracted.lift({})
        only = _only(problem, full[0], contracted.fixed_cost)
        return only, lambda _: full
    place = {node: at for at, node in enumerate(nodes)}
    costs = [contracted.costs[node] for node in nodes]
    costs[0] = costs[0] + contracted.fixed_cost
    usages = [np.zeros(len(c), dtype=np.int64) for c in costs]
    spans = [problem.intervals[node] for node in nodes]
    for node, (leader, choices) in contracted.led().items():
        if takes_memory(problem, node):
            usages[place[leader]] = usages[place[leader]] + problem.usages[node][choices]
            spans[place[leader]] = problem.intervals[node]
    smaller = Problem(
        name=problem.name,
        keys=tuple(problem.keys[node] for node in nodes),
        labels=tuple(_picked(problem.labels[node], contracted.kept[node]) for node in nodes),
        costs=tuple(costs),
        usages=tuple(usages),
        intervals=tuple(spans),
        edges=tuple(
            Edge(place[a], place[b], contracted.tables[number])
            for a in nodes
            for b, number in contracted.near[a].items()
            if a < b
        ),
        usage_limit=problem.usage_limit,
    )
    return smaller, lambda choice: contracted.lift(dict(zip(nodes, choice, strict=True)))


def _only(problem: Problem, choice: int, cost: int) -> Problem:
    """One node with one choice, which stands for a problem with nothing left to decide."""
    return Problem(
        name=problem.name,
        keys=problem.keys[:1],
        labels=(problem.labels[0][choice : choice + 1],),
        costs=(np.array([cost]),),
        usages=(np.zeros(1, dtype=np.int64),),
        intervals=((0, 0),),
        usage_limit=problem.usage_limit,
    )


def _picked(labels: tuple[str, ...], kept: IntArray) -> tuple[str, ...]:
    return tuple(labels[int(c)] for c in kept)
