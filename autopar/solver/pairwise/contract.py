"""Contracts a problem without flows to the nodes that still have a decision.

* A node whose choice another's determines *follows* it: where a table allows a single choice of `b`
  for every choice of `a`, the cost and the edges of `b` move to `a`. The memory of `b` becomes
  memory of `a`, in the interval of `b`. Most edges of real sharding problems are of this kind: a
  chain of unary ops follows its root.
* A node that takes no memory and has at most two neighbours is *eliminated*: for every choice of
  its neighbours it takes its cheapest one.
* A node with one choice is *settled*.

Meanwhile, choices that no neighbour allows are dropped, and parallel edges are added up. Tables
that are sums of a row and a column part become costs of their nodes. All of it is exact: a lifted
plan costs as much as the contracted one, and the cheapest plan is among them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

import numpy as np

from autopar.ir.problem import FORBIDDEN, IntArray, Problem
from autopar.solver.clock import Clock
from autopar.solver.pairwise.tables import Tables, added

_STEPS_PER_LOOK = 256


@dataclass(frozen=True, slots=True)
class Decided:
    """`node` takes `choices[c...]` where `leaders` (none, one or two) take `c...`, in choices of
    the problem; -1 where the leaders have no such choices."""

    node: int
    leaders: tuple[int, ...]
    choices: IntArray


@dataclass(slots=True)
class Contracted:
    """The contracted problem: `costs[i]` and `kept[i]` (choices of the problem) of the nodes in
    `nodes`, and `near[i][j]`, the number of the table between `i` (rows) and `j`. `decided` lists
    the other nodes in the order in which they were decided, and every plan pays `fixed_cost`.
    `takes_memory[i]` says whether `i`, or a node that follows it, takes memory under the limit.
    `possible` is false when no plan is allowed."""

    tables: Tables
    nodes: list[int]
    costs: list[IntArray]
    kept: list[IntArray]
    near: list[dict[int, int]]
    takes_memory: list[bool]
    decided: list[Decided]
    fixed_cost: int = 0
    possible: bool = True

    def lift(self, choice: dict[int, int]) -> tuple[int, ...]:
        """Choices of the problem, from those of `nodes` (as indices in `kept`)."""
        full = [0] * len(self.costs)
        for node, c in choice.items():
            full[node] = int(self.kept[node][c])
        for item in reversed(self.decided):
            full[item.node] = int(item.choices[tuple(full[leader] for leader in item.leaders)])
        return tuple(full)

    def led(self) -> dict[int, tuple[int, IntArray]]:
        """Per node that may take memory, the node in `nodes` that determines it, and its choice for
        each choice of that one; -1 and a single choice for settled nodes."""
        by_node = {node: (node, self.kept[node]) for node in self.nodes}
        for item in reversed(self.decided):
            if not item.leaders:
                by_node[item.node] = (-1, item.choices)
            elif len(item.leaders) == 1 and item.leaders[0] in by_node:
                leader, choices = by_node[item.leaders[0]]
                by_node[item.node] = (leader, item.choices[choices])
        return by_node


def contract(problem: Problem, clock: Clock | None = None) -> Contracted:
    """`problem` contracted as far as possible, or (still exact) until the time is up."""
    work = _Work(problem)
    work.run(clock or Clock(None))
    return work.result


def takes_memory(problem: Problem, node: int) -> bool:
    """Whether any choice of `node` takes memory at any time that a limit applies to."""
    return problem.usage_limit is not None and any(
        usage.start < usage.stop and usage.amounts.any() for usage in problem.usages[node]
    )


class _Work:
    def __init__(self, problem: Problem) -> None:
        num_nodes = len(problem.keys)
        self.problem = problem
        self.result = Contracted(
            tables=Tables(),
            nodes=list(range(num_nodes)),
            costs=[np.minimum(costs, FORBIDDEN) for costs in problem.costs],
            kept=[np.arange(len(costs)) for costs in problem.costs],
            near=[{} for _ in range(num_nodes)],
            takes_memory=[takes_memory(problem, node) for node in range(num_nodes)],
            decided=[],
        )
        self.alive = [True] * num_nodes
        self._changed = deque(range(num_nodes))
        self._dirty: deque[tuple[int, int]] = deque()
        self._queued: set[tuple[int, int]] = set()
        for edge in problem.edges:
            if edge.source == edge.target:
                self._charge(edge.source, np.minimum(np.diagonal(edge.cost), FORBIDDEN))
            else:
                number = self.result.tables.add(np.minimum(edge.cost, FORBIDDEN))
                self._join(edge.source, edge.target, number)

    def run(self, clock: Clock) -> None:
        """Processes every node and edge whose costs or neighbours have changed, until none have."""
        result = self.result
        for step in count():
            is_done = not result.possible or not (self._changed or self._dirty)
            if is_done or (step % _STEPS_PER_LOOK == 0 and clock.expired):
                break
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
        if not self.result.possible:
            return
        if len(self.result.costs[node]) == 1:
            self._settle(node)
        elif not self.result.takes_memory[node] and len(self.result.near[node]) <= 2:
            self._eliminate(node)

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
        self._changed.extend((a, b))

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
        result.decided.append(Decided(node, (leader,), choices))
        result.takes_memory[leader] |= result.takes_memory[node]
        self.alive[node] = False
        for other, number in self._leave(node):
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
        """Settles a node with one choice: its edges become costs of their other ends."""
        result = self.result
        result.decided.append(Decided(node, (), result.kept[node][:1].reshape(())))
        result.fixed_cost += int(result.costs[node][0])
        self.alive[node] = False
        for other, number in self._leave(node):
            self._charge(other, result.tables[number][0])

    def _eliminate(self, node: int) -> None:
        """Eliminates a node without memory and with at most two neighbours: it takes its cheapest
        choice for each of theirs.

        Between two neighbours that leaves a table. The node stays if that table would be larger
        than the two it replaces.
        """
        result = self.result
        near = result.near[node]
        tables = [result.tables[number] for number in near.values()]
        if len(tables) == 2:
            size = tables[0].shape[1] * tables[1].shape[1]
            if size > tables[0].size + tables[1].size:
                return
        shape = [len(result.costs[node])] + [1] * len(tables)
        total = result.costs[node].reshape(shape)
        for axis, table in enumerate(tables, start=1):
            wide = [len(table)] + [1] * len(tables)
            wide[axis] = table.shape[1]
            total = added(total, table.reshape(wide))
        self.alive[node] = False
        others = [other for other, _ in self._leave(node)]
        cheapest = total.argmin(axis=0)
        choices = np.full([len(self.problem.costs[other]) for other in others], -1, dtype=np.int64)
        choices[np.ix_(*(result.kept[other] for other in others))] = result.kept[node][cheapest]
        result.decided.append(Decided(node, tuple(others), choices))
        least = total.min(axis=0)
        if not others:
            result.fixed_cost += int(least)
        elif len(others) == 1:
            self._charge(others[0], least)
        else:
            self._join(others[0], others[1], result.tables.add(least))

    def _leave(self, node: int) -> list[tuple[int, int]]:
        """Removes `node` from the graph; returns its neighbours and tables."""
        near = self.result.near
        left, near[node] = list(near[node].items()), {}
        for other, _ in left:
            del near[other][node]
            self._changed.append(other)
        return left
