"""The cheapest routes of a tensor from the state it is made in to the states of its uses.

A flow with a fixed integer choice is a minimum-cost Steiner arborescence: the root is the state of
the source, the terminals are the distinct states of its sinks. It is solved exactly by the
Dreyfus-Wagner recursion over subsets of terminals, with a Dijkstra search per subset (Dreyfus and
Wagner 1971; Erickson, Monma and Veinott 1987), for at most `MAX_EXACT_TERMINALS` terminals. With
more, the path heuristic of Takahashi and Matsuyama (1980) gives an upper bound (`Route.exact`).

Ties: of equally cheap arborescences one with the fewest arcs is taken, then the smaller arc index
decides step by step. Lengths are Python integers (cost x scale + 1 per arc), so nothing overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from autopar.ir.problem import FORBIDDEN, Flow, IntArray

# Shortest paths between the states of a flow.

_MAX_REMEMBERED = 256
"""The size of the cache: a problem on three axes has some 130 distinct distance arrays, and each of
its programs reads all of them."""


def all_distances(flows: Sequence[Flow]) -> list[IntArray]:
    """`shortest_distances` of each flow. Flows with equal arcs share a read-only array."""
    return [
        _known(len(f.states), f.tails.tobytes(), f.heads.tobytes(), f.costs.tobytes())
        for f in flows
    ]


def shortest_distances(size: int, tails: IntArray, heads: IntArray, costs: IntArray) -> IntArray:
    """The cost of the shortest path between each two of `size` states (Floyd and Warshall);
    `FORBIDDEN` where there is none."""
    distances = np.full((size, size), FORBIDDEN, dtype=np.int64)
    np.fill_diagonal(distances, 0)
    np.minimum.at(distances, (tails, heads), costs)
    for middle in range(size):
        # Twice FORBIDDEN still fits; the minimum brings it back to FORBIDDEN.
        np.minimum(distances, distances[:, middle, None] + distances[None, middle], out=distances)
    return distances


@lru_cache(_MAX_REMEMBERED)
def _known(size: int, tails: bytes, heads: bytes, costs: bytes) -> IntArray:
    distances = shortest_distances(
        size, *(np.frombuffer(each, np.int64) for each in (tails, heads, costs))
    )
    distances.flags.writeable = False
    return distances


MAX_EXACT_TERMINALS = 6
UNREACHABLE = 1 << 200
_AT_TERMINAL = -1
_UNIT = 1 << 64
"""The weight of a nanosecond where there is a second cost."""


@dataclass(frozen=True, slots=True)
class Route:
    """The arcs (ascending) that serve all terminals, their cost, and whether it is the lowest."""

    cost: int
    arcs: tuple[int, ...]
    exact: bool = True


class Links:
    """The ends of a flow's arcs. Flows of equal tensors share them (`links_of`): there are
    thousands of arcs, and of flows."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    @cached_property
    def tails(self) -> list[int]:
        """Per arc, the state it leads from."""
        return self._flow.tails.tolist()

    @cached_property
    def heads(self) -> list[int]:
        """Per arc, the state it leads to."""
        return self._flow.heads.tolist()

    @cached_property
    def into(self) -> list[list[int]]:
        """Per state, the arcs that end there."""
        arcs: list[list[int]] = [[] for _ in self._flow.states]
        for arc, head in enumerate(self.heads):
            arcs[head].append(arc)
        return arcs


def links_of(flows: Sequence[Flow]) -> list[Links]:
    """The links of each flow."""
    known: dict[tuple[int, int, int], Links] = {}
    kinds = [(id(flow.tails), id(flow.heads), len(flow.states)) for flow in flows]
    return [known.setdefault(kind, Links(flow)) for kind, flow in zip(kinds, flows, strict=True)]


@dataclass(slots=True)
class _Table:
    """Per state: the length of the best arborescence from there to a set of terminals, and its
    first step. That is an arc (>= 0), `_AT_TERMINAL`, or a subset of the terminals to split off.
    Both are final where the length is at most `reached`. `heap` has the states to go on from."""

    length: list[int]
    step: list[int | frozenset[int]]
    heap: list[tuple[int, int]]
    reached: int = -1


class Router:
    """Computes `route(root, terminals)` for one flow, with a cache. It computes only what is
    needed: most tensors are used in, or near, the state they are made in.

    `second` is a second cost per arc, at least 0, with a sum below `_UNIT`: it decides between
    equally cheap arborescences.
    """

    def __init__(self, flow: Flow, links: Links, second: IntArray | None = None) -> None:
        self.num_states = len(flow.states)
        self._flow, self._links, self._second = flow, links, second
        self._scale = (len(flow.costs) + 1) * (1 if second is None else _UNIT)
        self._tables: dict[frozenset[int], _Table] = {}
        self._routes: dict[tuple[int, frozenset[int]], Route | None] = {}

    @cached_property
    def _costs(self) -> list[int]:
        return self._flow.costs.tolist()

    @cached_property
    def _extra(self) -> list[int]:
        """Per arc, its length beyond its cost: 1, so that fewer arcs are better."""
        if self._second is None:
            return [1] * len(self._costs)
        seconds: list[int] = self._second.tolist()
        return [second * (len(seconds) + 1) + 1 for second in seconds]

    def route(self, root: int, terminals: frozenset[int]) -> Route | None:
        """The cheapest arcs from `root` to all `terminals`; None when one cannot be reached."""
        terminals = terminals - {root}
        key = (root, terminals)
        if key not in self._routes:
            self._routes[key] = self._search(root, terminals)
        return self._routes[key]

    def lengths(self, terminals: frozenset[int]) -> list[int] | None:
        """Per root state, the cost of reaching all `terminals` (`UNREACHABLE` where impossible);
        None with too many terminals for an exact answer."""
        if not terminals:
            return [0] * self.num_states
        if len(terminals) > MAX_EXACT_TERMINALS:
            return None
        length = self._table(terminals).length
        return [x if x >= UNREACHABLE else x // self._scale for x in length]

    def _search(self, root: int, terminals: frozenset[int]) -> Route | None:
        if not terminals:
            return Route(0, ())
        if any(self._length(root, t) >= UNREACHABLE for t in terminals):
            return None
        exact = len(terminals) <= MAX_EXACT_TERMINALS
        arcs = self._unfold(root, terminals) if exact else self._grow(root, terminals)
        ordered = tuple(sorted(arcs))
        return Route(sum(self._costs[a] for a in ordered), ordered, exact)

    def _length(self, root: int, terminal: int) -> int:
        return self._table(frozenset({terminal}), root).length[root]

    def _table(self, terminals: frozenset[int], root: int | None = None) -> _Table:
        """The table for `terminals`, final at `root`, or by default at all roots. Dijkstra's
        search, against the direction of arcs, extends the arborescences as far as that takes."""
        table = self._tables.get(terminals)
        if table is None:
            table = self._tables[terminals] = self._start(terminals)
        length, step, heap = table.length, table.step, table.heap
        into, tails = self._links.into, self._links.tails
        costs, extra, scale = self._costs, self._extra, self._scale
        while heap and (root is None or length[root] > table.reached):
            at, head = heappop(heap)
            if at > length[head]:
                continue
            table.reached = at
            for arc in into[head]:
                if costs[arc] >= FORBIDDEN:
                    continue
                tail = tails[arc]
                there = at + costs[arc] * scale + extra[arc]
                known = step[tail]
                if there < length[tail]:
                    heappush(heap, (there, tail))
                elif there > length[tail] or not isinstance(known, int) or not known > arc:
                    continue
                length[tail] = there
                step[tail] = arc
        return table

    def _start(self, terminals: frozenset[int]) -> _Table:
        """The table before any arc: at the terminal, or where two smaller arborescences meet."""
        length = [UNREACHABLE] * self.num_states
        step: list[int | frozenset[int]] = [_AT_TERMINAL] * self.num_states
        first, *rest = sorted(terminals)
        if not rest:
            length[first] = 0
            return _Table(length, step, [(0, first)])
        for bits in range((1 << len(rest)) - 1):
            part = frozenset([first] + [t for j, t in enumerate(rest) if bits >> j & 1])
            left, right = self._table(part).length, self._table(terminals - part).length
            for state in range(self.num_states):
                both = left[state] + right[state]
                if both < length[state]:
                    length[state] = both
                    step[state] = part
        heap = [(x, v) for v, x in enumerate(length) if x < UNREACHABLE]
        heapify(heap)
        return _Table(length, step, heap)

    def _unfold(self, root: int, terminals: frozenset[int]) -> set[int]:
        arcs: set[int] = set()
        todo = [(root, terminals)]
        while todo:
            state, goal = todo.pop()
            step = self._table(goal, state).step[state]
            if isinstance(step, frozenset):
                todo += [(state, step), (state, goal - step)]
            elif step != _AT_TERMINAL:
                arcs.add(step)
                todo.append((self._links.heads[step], goal))
        return arcs

    def _grow(self, root: int, terminals: frozenset[int]) -> set[int]:
        """Attaches the nearest terminal to the tree until none is missing."""
        arcs: set[int] = set()
        reached, missing = {root}, set(terminals)
        while missing:
            _, terminal, start = min((self._length(v, t), t, v) for t in missing for v in reached)
            path = self._unfold(start, frozenset({terminal}))
            arcs |= path
            reached |= {self._links.heads[a] for a in path}
            missing -= reached
        return arcs
