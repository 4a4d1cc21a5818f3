"""Contracts a problem without flows: nodes whose choice another's decides become part of it.

Where a table allows a single choice of `b` for every choice of `a`, node `b` follows `a`: its cost
and its edges move to `a`, and the memory it takes becomes memory that `a` takes, in the interval of
`b`. Two thirds of the edges of real sharding problems are of this kind. On the way, choices that
no neighbour allows are dropped, tables that are sums of a row and a column part become costs of
their nodes, and parallel edges are added up. Everything is exact: the plans that are allowed, and
their costs, are the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from autopar.problem import FORBIDDEN, IntArray, Problem
from autopar.solver.large.tables import Tables, added


@dataclass(frozen=True, slots=True)
class Follower:
    """Node `node` takes choice `choices[c]` where `leader` takes `c` (in choices of the problem;
    -1 where `leader` cannot take `c`). A node with one choice left follows nobody (-1)."""

    node: int
    leader: int
    choices: IntArray


@dataclass(slots=True)
class Contracted:
    """What is left: `costs[i]` and `kept[i]` (choices of the problem) of the nodes in `nodes`, and
    `near[i][j]`, the number of the table between `i` (rows) and `j`. `followers` in the order they
    were found, `fixed_cost` is what settled nodes cost. `possible` is false when no plan is allowed."""

    tables: Tables
    nodes: list[int]
    costs: list[IntArray]
    kept: list[IntArray]
    near: list[dict[int, int]]
    followers: list[Follower]
    fixed_cost: int = 0
    possible: bool = True

    def lift(self, choice: dict[int, int]) -> tuple[int, ...]:
        """Choices of the problem, from those of `nodes` (as positions in `kept`)."""
        full = np.zeros(len(self.costs), dtype=np.int64)
        for node, c in choice.items():
            full[node] = self.kept[node][c]
        for follower in reversed(self.followers):
            at = full[follower.leader] if follower.leader >= 0 else 0
            full[follower.node] = follower.choices[at]
        return tuple(full.tolist())


def contract(problem: Problem) -> Contracted:
    """`problem` contracted until nothing more follows."""
    work = _Work(problem)
    work.run()
    return work.result


class _Work:
    def __init__(self, problem: Problem) -> None:
        count = len(problem.keys)
        self.problem = problem
        self.result = Contracted(
            tables=Tables(),
            nodes=list(range(count)),
            costs=[np.minimum(costs, FORBIDDEN) for costs in problem.costs],
            kept=[np.arange(len(costs)) for costs in problem.costs],
            near=[{} for _ in range(count)],
            followers=[],
        )
        self.alive = [True] * count
        self._changed = deque(range(count))
        self._dirty: deque[tuple[int, int]] = deque()
        self._queued: set[tuple[int, int]] = set()
        for edge in problem.edges:
            if edge.source == edge.target:
                self._charge(edge.source, np.minimum(np.diagonal(edge.cost), FORBIDDEN))
            else:
                number = self.result.tables.add(np.minimum(edge.cost, FORBIDDEN))
                self._join(edge.source, edge.target, number)

    def run(self) -> None:
        """Looks at every node and edge whose costs are new, until none are."""
        result = self.result
        while result.possible and (self._changed or self._dirty):
            if self._changed:
                node = self._changed.popleft()
                if self.alive[node]:
                    self._look_at_node(node)
                continue
            pair = self._dirty.popleft()
            self._queued.discard(pair)
            a, b = pair
            if self.alive[a] and self.alive[b] and b in result.near[a]:
                self._look_at_edge(a, b)
        result.nodes = [i for i, alive in enumerate(self.alive) if alive]

    def _join(self, a: int, b: int, number: int) -> None:
        """Adds a table between `a` (rows) and `b`."""
        near, tables = self.result.near, self.result.tables
        if b in near[a]:
            number = tables.sum(near[a][b], number)
        near[a][b] = number
        near[b][a] = tables.transposed(number)
        self._mark(a, b)

    def _mark(self, a: int, b: int) -> None:
        pair = (min(a, b), max(a, b))
        if pair not in self._queued:
            self._queued.add(pair)
            self._dirty.append(pair)

    def _look_at_node(self, node: int) -> None:
        allowed = self.result.costs[node] < FORBIDDEN
        if not allowed.all():
            self._keep(node, np.flatnonzero(allowed))
        if len(self.result.costs[node]) == 1:
            self._settle(node)

    def _look_at_edge(self, a: int, b: int) -> None:
        near, tables = self.result.near, self.result.tables
        for i, j in ((a, b), (b, a)):
            possible = tables.possible_rows(near[i][j])
            if possible is not None:
                self._keep(i, np.flatnonzero(possible))
                return
        parts = tables.parts(near[a][b])
        if parts is not None:
            self._cut(a, b)
            self._charge(a, parts[0])
            self._charge(b, parts[1])
            return
        for leader, node in sorted(((a, b), (b, a)), key=lambda pair: (len(near[pair[1]]), pair)):
            column = tables.column_of_row(near[leader][node])
            if column is not None:
                self._follow(leader, node, column)
                return

    def _cut(self, a: int, b: int) -> None:
        del self.result.near[a][b]
        del self.result.near[b][a]

    def _charge(self, node: int, costs: IntArray) -> None:
        self.result.costs[node] = added(self.result.costs[node], costs)
        self._changed.append(node)

    def _follow(self, leader: int, node: int, column: IntArray) -> None:
        """`node` takes its choice `column[c]` where `leader` takes `c`."""
        result = self.result
        table = result.tables[result.near[leader][node]]
        self._cut(leader, node)
        own = added(result.costs[node][column], table[np.arange(len(column)), column])
        self._charge(leader, own)
        choices = np.full(len(self.problem.costs[leader]), -1, dtype=np.int64)
        choices[result.kept[leader]] = result.kept[node][column]
        result.followers.append(Follower(node, leader, choices))
        self.alive[node] = False
        near, result.near[node] = result.near[node], {}
        for other, number in near.items():
            del result.near[other][node]
            self._join(leader, other, result.tables.rows(number, column))

    def _keep(self, node: int, picked: IntArray) -> None:
        """Drops all choices of `node` but those `picked`."""
        result = self.result
        if not len(picked):
            result.possible = False
            return
        result.costs[node] = result.costs[node][picked]
        result.kept[node] = result.kept[node][picked]
        self._changed.append(node)
        for other, number in result.near[node].items():
            fewer = result.tables.rows(number, picked)
            result.near[node][other] = fewer
            result.near[other][node] = result.tables.transposed(fewer)
            self._mark(node, other)

    def _settle(self, node: int) -> None:
        """A node with one choice: what its edges cost is up to their other ends."""
        result = self.result
        result.followers.append(Follower(node, -1, result.kept[node]))
        result.fixed_cost += int(result.costs[node][0])
        self.alive[node] = False
        near, result.near[node] = result.near[node], {}
        for other, number in near.items():
            del result.near[other][node]
            self._charge(other, result.tables[number][0])
