"""Ties equal blocks: the layers of a model, which are to be laid out alike.

`tie_blocks` takes blocks of nodes, corresponding nodes in corresponding places, and makes each
block choose as the first one does. In general that is a *restriction*: a tied plan costs what it
says, and the cheapest of them may cost more than the cheapest plan (memory may be spent on some
layers only, and two layers can differ because their neighbours do). It is *exact* where the blocks
are equal and have nothing to do with anything else, a limit on memory included: whatever is best
for one is best for all. `exact_blocks` finds those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import FORBIDDEN, Edge, IntArray, Problem
from autopar.solver.reductions.components import split_components
from autopar.solver.reductions.shrink import Lift, inline_chains

Blocks = Sequence[Sequence[int]]


def tie_blocks(problem: Problem, blocks: Blocks) -> tuple[Problem, Lift]:
    """`problem` with every block tied to the first. SolverError: the blocks differ in size, or
    corresponding nodes in their choices.

    What takes no memory is gone afterwards; a node that takes memory in an interval of its own
    stays, with one choice per choice of the node it is tied to.
    """
    first, *others = blocks
    ties: list[Edge] = []
    for block in others:
        if len(block) != len(first):
            raise SolverError(f"blocks of {len(first)} and {len(block)} nodes cannot be tied")
        for leader, node in zip(first, block, strict=True):
            if problem.labels[leader] != problem.labels[node]:
                raise SolverError(
                    f"nodes {problem.keys[leader]} and {problem.keys[node]} cannot be tied: they "
                    "have different choices"
                )
            ties.append(Edge(leader, node, _equal(len(problem.labels[node]))))
    tied = replace(problem, edges=(*problem.edges, *ties))
    return inline_chains(tied)


def exact_blocks(problem: Problem) -> list[list[tuple[int, ...]]]:
    """Sets of blocks that can be tied without loss: components that are equal node by node, in the
    order of the problem's nodes."""
    found: dict[object, list[tuple[int, ...]]] = {}
    parts, _ = split_components(problem)
    members = {key: i for i, key in enumerate(problem.keys)}
    for part in parts:
        block = tuple(members[key] for key in part.keys)
        found.setdefault(_content(part), []).append(block)
    return [blocks for blocks in found.values() if len(blocks) > 1]


def _content(part: Problem) -> object:
    """What decides the best plan of a part without flows: equal content, equal plans."""
    return (
        part.labels,
        tuple(c.tobytes() for c in part.costs),
        tuple(u.tobytes() for u in part.usages),
        part.flows,
        tuple((e.source, e.target, e.cost.tobytes()) for e in part.edges),
        _order_of(part.intervals),
    )


def _order_of(intervals: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The intervals with times replaced by their rank: only the order of times matters."""
    rank = {time: at for at, time in enumerate(sorted({t for span in intervals for t in span}))}
    return tuple((rank[start], rank[stop]) for start, stop in intervals)


def _equal(count: int) -> IntArray:
    return np.where(np.eye(count, dtype=np.bool_), 0, FORBIDDEN)
