"""Which of equally fast ways tensors take, so that most is hidden.

Where two mesh axes lie on links of one kind, a tensor that moves over both may take either first:
as fast, but the links that carry more of it differ. Window by window the busiest resource counts,
so that what is best for one tensor depends on the others: each in turn takes the way with which
most is hidden, until none changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir.problem import FORBIDDEN, IntArray, Problem, Window
from autopar.solver.routing import Links, Route, Router

_MAX_SWEEPS = 8


class _Way(NamedTuple):
    """A route of a flow, and what it saves: per window that it is in, by resource."""

    route: Route
    savings: tuple[tuple[int, IntArray], ...]


class FastestWays:
    """Chooses among fastest ways, for one problem."""

    def __init__(self, problem: Problem, links: Sequence[Links]) -> None:
        self.problem = problem
        self._links = links
        self._of_flow: dict[int, list[tuple[int, IntArray]]] = {}
        self._routers: dict[int, list[Router]] = {}
        self._known: dict[tuple[int, int, frozenset[int]], list[_Way]] = {}
        for w, window in enumerate(problem.windows):
            for f in sorted({f for saving in window.savings for f in saving.flows}):
                size = len(problem.flows[f].costs)
                rows = [s.flows.get(f, np.zeros(size, np.int64)) for s in window.savings]
                self._of_flow.setdefault(f, []).append((w, np.stack(rows)))

    def __call__(self, choice: Sequence[int], routes: Sequence[Route]) -> tuple[list[Route], int]:
        """The ways that tensors take instead of `routes`, and what is hidden with them, where each
        node takes its `choice`."""
        sums = [_of_nodes(window, choice) for window in self.problem.windows]
        taken, open_to = [*routes], list[tuple[int, list[_Way]]]()
        now: dict[int, _Way] = {}
        for f in self._of_flow:
            ways = self._ways(f, choice, routes[f])
            now[f] = ways[0]
            _count(sums, ways[0], 1)
            if len(ways) > 1:
                open_to.append((f, ways))
        for _ in range(_MAX_SWEEPS):
            changed = False
            for f, ways in open_to:
                _count(sums, now[f], -1)
                best = max(ways, key=lambda way: _gain(sums, way))
                if _gain(sums, best) > _gain(sums, now[f]):
                    now[f], taken[f], changed = best, best.route, True
                _count(sums, now[f], 1)
            if not changed:
                break
        return taken, sum(int(each.min()) for each in sums)

    def _ways(self, f: int, choice: Sequence[int], route: Route) -> list[_Way]:
        flow = self.problem.flows[f]
        root = int(flow.source_state[choice[flow.source]])
        asked = (int(sink.state[choice[sink.node]]) for sink in flow.sinks)
        goals = frozenset(state for state in asked if state >= 0)
        key = f, root, goals
        if key not in self._known:
            found = {route.arcs: route}
            for router in self._routers_of(f) if route.arcs and route.exact else ():
                other = router.route(root, goals)
                if other is not None and other.cost == route.cost:
                    found.setdefault(other.arcs, other)
            self._known[key] = [self._way(f, each) for each in found.values()]
        return self._known[key]

    def _routers_of(self, f: int) -> list[Router]:
        """Of the fastest ways, one finds the way with which a resource is the least busy."""
        if f not in self._routers:
            flow, links = self.problem.flows[f], self._links[f]
            savings = np.sum([rows for _, rows in self._of_flow[f]], axis=0)
            is_open = flow.costs < FORBIDDEN
            most = flow.costs[is_open].max(initial=0) * len(savings)
            left = [np.where(is_open, most - saved, FORBIDDEN) for saved in savings]
            distinct = [*{some.tobytes(): some for some in left}.values()]
            made = [Router(flow, links, some) for some in distinct] if len(distinct) > 1 else []
            self._routers[f] = made
        return self._routers[f]

    def _way(self, f: int, route: Route) -> _Way:
        arcs = list(route.arcs)
        return _Way(route, tuple((w, rows[:, arcs].sum(axis=1)) for w, rows in self._of_flow[f]))


def _of_nodes(window: Window, choice: Sequence[int]) -> IntArray:
    return np.array(
        [sum(int(x[choice[i]]) for i, x in saving.nodes.items()) for saving in window.savings],
        np.int64,
    )


def _count(sums: list[IntArray], way: _Way, times: int) -> None:
    for w, saved in way.savings:
        sums[w] += times * saved


def _gain(sums: list[IntArray], way: _Way) -> int:
    return sum(int((sums[w] + saved).min() - sums[w].min()) for w, saved in way.savings)
