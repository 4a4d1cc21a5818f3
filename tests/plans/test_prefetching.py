"""Before which ops gathers of parameters start: in blocks of a linear step, made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from autopar.ir.graph import Node, Role
from autopar.plans.scheduling.bucketing import Gathers, starts_before
from tests.graphs import linear_step

TP, DP = 1, 0


@dataclass
class Sent:
    axis: int
    num_bytes: int


@dataclass
class Due:
    """What is read of `Gathers`."""

    buckets: list[Sent]
    due: dict[int, list[int]] = field(default_factory=dict[int, list[int]])


def started(sent: list[Sent], waits: dict[int, set[int]]) -> list[list[int]]:
    """Per op of a block of three, what starts before it; `waits` by the place of the op."""
    graph = linear_step(8, 4, 4, layers=3)
    ops = list(graph.with_role(Role.OP))[:3]
    gathers = cast(Gathers, Due(sent, {5: [*range(len(sent))]}))
    blocks: dict[int, list[Node]] = {5: ops}
    found = starts_before(graph, gathers, blocks, {ops[i].index: axes for i, axes in waits.items()})
    return [found.get(op.index, []) for op in ops]


def test_all_starts_with_a_block_whose_ops_wait_for_nothing_there() -> None:
    assert started([Sent(DP, 1), Sent(DP, 5), Sent(DP, 1)], {1: {TP}}) == [[0, 1, 2], [], []]


def test_the_rest_starts_behind_what_ops_wait_for_bytes_in_proportion_to_work() -> None:
    sent = [Sent(TP, 2), Sent(TP, 2), Sent(TP, 2)]
    assert started(sent, {1: {TP}, 2: {TP}}) == [[0], [1], [2]]
    assert started(sent, {1: {TP}}) == [[0], [1, 2], []]
    assert started([Sent(TP, 8), Sent(DP, 3), Sent(TP, 1)], {2: {TP}}) == [[0, 1], [], [2]]


def test_a_block_without_ops_starts_nothing() -> None:
    graph = linear_step(8, 4, 4)
    gathers = cast(Gathers, Due([Sent(DP, 1)], {3: [0]}))
    assert starts_before(graph, gathers, {}, {}) == {}
