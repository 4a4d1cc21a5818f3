"""The cheapest way for one tensor from the state it is made in to every state asked for.

A flow with a fixed integer choice is a minimum-cost Steiner arborescence: the root is the state of
the source, the terminals are the distinct states its sinks ask for. It is solved exactly by the
Dreyfus-Wagner recursion over subsets of terminals, with a Dijkstra search per subset (Dreyfus and
Wagner 1971; Erickson, Monma and Veinott 1987), for at most `MAX_EXACT_TERMINALS` terminals. Beyond
that the path heuristic of Takahashi and Matsuyama (1980) gives an upper bound, and says so.

Ties: of equally cheap arborescences one with the fewest arcs is taken, then the smaller arc index
decides step by step. Lengths are Python integers (cost x scale + 1 per arc), so nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from autopar.ir.problem import FORBIDDEN, Flow, IntArray

MAX_EXACT_TERMINALS = 6
UNREACHABLE = 1 << 200
_AT_TERMINAL = -1
_UNIT = 1 << 64
"""What a nanosecond counts where there is a second measure."""


@dataclass(frozen=True, slots=True)
class Route:
    """The arcs (ascending) that serve all terminals, their cost, and whether it is the lowest."""

    cost: int
    arcs: tuple[int, ...]
    exact: bool = True


@dataclass(slots=True)
class _Table:
    """Per state: the length of the best arborescence that covers a set of terminals from there, and
    its first step: an arc (>= 0), `_AT_TERMINAL`, or a subset of the terminals to split off."""

    length: list[int]
    step: list[int | frozenset[int]]


class Router:
    """Answers `route(root, terminals)` for one flow; remembers what it has worked out.

    With `second`, at least 0 for each arc and less than `_UNIT` in sum, that of equally cheap
    arborescences is found whose sum of these is the lowest.
    """

    def __init__(self, flow: Flow, second: IntArray | None = None) -> None:
        self.num_states = len(flow.states)
        self._flow, self._second = flow, second
        self._scale = (len(flow.costs) + 1) * (1 if second is None else _UNIT)
        self._tables: dict[frozenset[int], _Table] = {}
        self._routes: dict[tuple[int, frozenset[int]], Route | None] = {}

    @cached_property
    def _tails(self) -> list[int]:
        return self._flow.tails.tolist()

    @cached_property
    def _heads(self) -> list[int]:
        return self._flow.heads.tolist()

    @cached_property
    def _costs(self) -> list[int]:
        return self._flow.costs.tolist()

    @cached_property
    def _lengths(self) -> list[int]:
        """One more per arc, so that fewer are better."""
        costs = (cost * self._scale + 1 for cost in self._costs)
        if self._second is None:
            return list(costs)
        factor = len(self._costs) + 1
        seconds: list[int] = self._second.tolist()
        return [cost + second * factor for cost, second in zip(costs, seconds, strict=True)]

    @cached_property
    def _into(self) -> list[list[tuple[int, int, int]]]:
        """Per state, the arcs that end there: tail, length, index. Made when first asked for: most
        tensors are used in the state they are made in."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_states)]
        ends = zip(self._tails, self._heads, self._costs, self._lengths, strict=True)
        for arc, (tail, head, cost, length) in enumerate(ends):
            if cost < FORBIDDEN:
                found[head].append((tail, length, arc))
        return found

    def route(self, root: int, terminals: frozenset[int]) -> Route | None:
        """The cheapest arcs from `root` to all `terminals`; None when one cannot be reached."""
        terminals = terminals - {root}
        key = (root, terminals)
        if key not in self._routes:
            self._routes[key] = self._search(root, terminals)
        return self._routes[key]

    def lengths(self, terminals: frozenset[int]) -> list[int] | None:
        """Per root state, the cost of covering `terminals` (`UNREACHABLE` where impossible); None
        when there are too many terminals for an exact answer."""
        if not terminals:
            return [0] * self.num_states
        if len(terminals) > MAX_EXACT_TERMINALS:
            return None
        return [x if x >= UNREACHABLE else x // self._scale for x in self._table(terminals).length]

    def _search(self, root: int, terminals: frozenset[int]) -> Route | None:
        if not terminals:
            return Route(0, ())
        if any(self._table(frozenset({t})).length[root] >= UNREACHABLE for t in terminals):
            return None
        exact = len(terminals) <= MAX_EXACT_TERMINALS
        arcs = self._unfold(root, terminals) if exact else self._grow(root, terminals)
        ordered = tuple(sorted(arcs))
        return Route(sum(self._costs[a] for a in ordered), ordered, exact)

    def _table(self, terminals: frozenset[int]) -> _Table:
        table = self._tables.get(terminals)
        if table is None:
            table = self._start(terminals)
            self._relax(table)
            self._tables[terminals] = table
        return table

    def _start(self, terminals: frozenset[int]) -> _Table:
        """Before any arc: at the terminal itself, or where two smaller arborescences meet."""
        table = _Table([UNREACHABLE] * self.num_states, [_AT_TERMINAL] * self.num_states)
        first, *rest = sorted(terminals)
        if not rest:
            table.length[first] = 0
            return table
        for bits in range((1 << len(rest)) - 1):
            part = frozenset([first] + [t for j, t in enumerate(rest) if bits >> j & 1])
            left, right = self._table(part).length, self._table(terminals - part).length
            for state in range(self.num_states):
                length = left[state] + right[state]
                if length < table.length[state]:
                    table.length[state] = length
                    table.step[state] = part
        return table

    def _relax(self, table: _Table) -> None:
        """Dijkstra against the arcs: extends the arborescences towards all roots."""
        length, step = table.length, table.step
        heap = [(x, v) for v, x in enumerate(length) if x < UNREACHABLE]
        heapify(heap)
        while heap:
            at, head = heappop(heap)
            if at > length[head]:
                continue
            for tail, arc_length, arc in self._into[head]:
                there = at + arc_length
                known = step[tail]
                if there < length[tail]:
                    heappush(heap, (there, tail))
                elif there > length[tail] or not isinstance(known, int) or not known > arc:
                    continue
                length[tail] = there
                step[tail] = arc

    def _unfold(self, root: int, terminals: frozenset[int]) -> set[int]:
        arcs: set[int] = set()
        todo = [(root, terminals)]
        while todo:
            state, goal = todo.pop()
            step = self._table(goal).step[state]
            if isinstance(step, frozenset):
                todo += [(state, step), (state, goal - step)]
            elif step != _AT_TERMINAL:
                arcs.add(step)
                todo.append((self._heads[step], goal))
        return arcs

    def _grow(self, root: int, terminals: frozenset[int]) -> set[int]:
        """Attaches the nearest terminal to the tree, again and again."""
        arcs: set[int] = set()
        reached, missing = {root}, set(terminals)
        while missing:
            _, terminal, start = min(
                (self._table(frozenset({t})).length[v], t, v) for t in missing for v in reached
            )
            path = self._unfold(start, frozenset({terminal}))
            arcs |= path
            reached |= {self._heads[a] for a in path}
            missing -= reached
        return arcs
