"""Cost and memory of a choice, computed from the problem alone, in integers.

This shares no code with the ILP: it checks everything that the solver says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.ir.grouping import grouped
from autopar.ir.problem import FORBIDDEN, Flow, IntArray, Problem, Window
from autopar.solver.routing import Links, Route, Router, links_of

# The choice among equally fast paths of tensors, so that most communication is hidden.
#
# Where two mesh axes lie on links of one kind, a tensor that moves over both may take either first.
# Both paths are as fast, but they load different links. In a window the busiest resource counts, so
# that the best path of one tensor depends on the others. One after the other, each takes the path
# with which most is hidden, until none changes.

_MAX_SWEEPS = 8


class _FlowPaths(NamedTuple):
    """A route of a flow, and its savings: pairs (window, saving of each resource)."""

    route: Route
    savings: tuple[tuple[int, IntArray], ...]


class FastestPaths:
    """Chooses among the fastest paths of one problem."""

    def __init__(self, problem: Problem, links: Sequence[Links]) -> None:
        self.problem = problem
        self._links = links
        self._routers: dict[int, list[Router]] = {}
        self._known: dict[tuple[int, int, frozenset[int]], list[_FlowPaths]] = {}
        self._of_flow = grouped(
            (f, (w, np.stack([s.flows.get(f, nothing) for s in window.savings])))
            for w, window in enumerate(problem.windows)
            for f in sorted({f for saving in window.savings for f in saving.flows})
            for nothing in (np.zeros(len(problem.flows[f].costs), np.int64),)
        )

    def __call__(self, choice: Sequence[int], routes: Sequence[Route]) -> tuple[list[Route], int]:
        """The routes that tensors take instead of `routes`, and the nanoseconds hidden with them,
        where each node takes its `choice`."""
        sums = [_of_nodes(window, choice) for window in self.problem.windows]
        paths = {f: self._paths(f, choice, routes[f]) for f in self._of_flow}
        open_to = {f: options for f, options in paths.items() if len(options) > 1}
        taken, now = [*routes], {f: options[0] for f, options in paths.items()}
        for path in now.values():
            _count(sums, path, 1)
        for _ in range(_MAX_SWEEPS):
            changed = False
            for f, options in open_to.items():
                _count(sums, now[f], -1)
                best = max(options, key=lambda path: _gain(sums, path))
                if _gain(sums, best) > _gain(sums, now[f]):
                    now[f], taken[f], changed = best, best.route, True
                _count(sums, now[f], 1)
            if not changed:
                break
        return taken, sum(int(each.min()) for each in sums)

    def _paths(self, f: int, choice: Sequence[int], route: Route) -> list[_FlowPaths]:
        flow = self.problem.flows[f]
        root = int(flow.source_state[choice[flow.source]])
        states = (int(sink.state[choice[sink.node]]) for sink in flow.sinks)
        goals = frozenset(state for state in states if state >= 0)
        key = f, root, goals
        if key not in self._known:
            routes = {route.arcs: route}
            for router in self._routers_of(f) if route.arcs and route.exact else ():
                other = router.route(root, goals)
                if other is not None and other.cost == route.cost:
                    routes.setdefault(other.arcs, other)
            self._known[key] = [
                _FlowPaths(
                    each, tuple((w, rows[:, each.arcs].sum(axis=1)) for w, rows in self._of_flow[f])
                )
                for each in routes.values()
            ]
        return self._known[key]

    def _routers_of(self, f: int) -> list[Router]:
        """Routers for flow `f`: each finds the fastest path that loads one resource least."""
        if f not in self._routers:
            flow, links = self.problem.flows[f], self._links[f]
            savings = np.sum([rows for _, rows in self._of_flow[f]], axis=0)
            is_open = flow.costs < FORBIDDEN
            most = flow.costs[is_open].max(initial=0) * len(savings)
            left = [np.where(is_open, most - saved, FORBIDDEN) for saved in savings]
            distinct = [*{some.tobytes(): some for some in left}.values()]
            routers = [Router(flow, links, some) for some in distinct] if len(distinct) > 1 else []
            self._routers[f] = routers
        return self._routers[f]


def _of_nodes(window: Window, choice: Sequence[int]) -> IntArray:
    return np.array(
        [sum(int(x[choice[i]]) for i, x in saving.nodes.items()) for saving in window.savings],
        np.int64,
    )


def _count(sums: list[IntArray], path: _FlowPaths, times: int) -> None:
    for w, saved in path.savings:
        sums[w] += times * saved


def _gain(sums: list[IntArray], path: _FlowPaths) -> int:
    return sum(int((sums[w] + saved).min() - sums[w].min()) for w, saved in path.savings)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cost and use of one choice.

    `objective` leaves out forbidden and unreachable parts, and means nothing unless `feasible`.
    `arcs[f]` and `flow_costs[f]` belong to flow `f`. `peak` bytes are in use at `peak_time`, the
    first of the worst times (`peak_usage`). `violation` names the first rule that is broken.
    `exact` is false if a flow has too many terminals for an exact arborescence: the objective is
    then an upper bound.
    """

    objective: int
    arcs: tuple[tuple[int, ...], ...]
    flow_costs: tuple[int, ...]
    peak: int
    peak_time: int
    feasible: bool
    violation: str = ""
    exact: bool = True


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """The cost of `choice` (one index per node). ValueError when it is not a choice per node."""
    return Evaluator(problem)(choice)


class Evaluator:
    """`evaluate` for many choices of one problem, with a cache of routes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        links = links_of(problem.flows)
        self.routers = tuple(map(Router, problem.flows, links))
        self._fastest = FastestPaths(problem, links)

    def __call__(self, choice: Sequence[int]) -> Evaluation:
        """See `evaluate`."""
        problem = self.problem
        if len(choice) != len(problem.keys):
            raise ValueError(f"{len(choice)} choices for {len(problem.keys)} nodes")
        objective, violations = self._nodes_and_edges(choice)
        cheapest = [
            flow_route(*each, choice) for each in zip(problem.flows, self.routers, strict=True)
        ]
        violations += [
            f"flow {flow.key} cannot reach a state that is asked for"
            for flow, route in zip(problem.flows, cheapest, strict=True)
            if route is None
        ]
        routes = [Route(0, ()) if route is None else route for route in cheapest]
        peak, peak_time = peak_usage(problem, choice)
        if problem.usage_limit is not None and peak > problem.limit_at(peak_time):
            limit = problem.limit_at(peak_time)
            violations.append(f"{peak} in use at time {peak_time}, the limit is {limit}")
        routes, hidden = self._fastest(choice, routes)
        return Evaluation(
            objective=objective + sum(r.cost for r in routes) - hidden,
            arcs=tuple(r.arcs for r in routes),
            flow_costs=tuple(r.cost for r in routes),
            peak=peak,
            peak_time=peak_time,
            feasible=not violations,
            violation=violations[0] if violations else "",
            exact=all(r.exact for r in routes),
        )

    def _nodes_and_edges(self, choice: Sequence[int]) -> tuple[int, list[str]]:
        problem = self.problem
        total = 0
        violations: list[str] = []
        for i, (costs, c) in enumerate(zip(problem.costs, choice, strict=True)):
            if not 0 <= c < len(costs):
                raise ValueError(f"node {problem.keys[i]} has no choice {c}")
            cost = int(costs[c])
            if cost >= FORBIDDEN:
                violations.append(f"node {problem.keys[i]} takes a forbidden choice")
            else:
                total += cost
        for edge in problem.edges:
            cost = int(edge.cost[choice[edge.source], choice[edge.target]])
            if cost >= FORBIDDEN:
                pair = f"{problem.keys[edge.source]} and {problem.keys[edge.target]}"
                violations.append(f"nodes {pair} take a forbidden pair of choices")
            else:
                total += cost
        return total, violations


def flow_route(flow: Flow, router: Router, choice: Sequence[int]) -> Route | None:
    """The cheapest arcs of `flow` under `choice`; None when a state cannot be reached."""
    states = (int(sink.state[choice[sink.node]]) for sink in flow.sinks)
    terminals = frozenset(state for state in states if state >= 0)
    root = int(flow.source_state[choice[flow.source]])
    if root < 0:
        return None if terminals else Route(0, ())
    return router.route(root, terminals)


def peak_usage(problem: Problem, choice: Sequence[int]) -> tuple[int, int]:
    """The sum of usages at the first of the worst times, and that time. Worst is where the sum is
    largest or, with limits of their own (`Problem.other_limits`), furthest above the limit. (0, 0)
    if nothing is ever live."""
    changes: dict[int, int] = {}
    for usages, c in zip(problem.usages, choice, strict=True):
        for usage in usages:
            if usage.start < usage.stop:
                amount = int(usage.amounts[c])
                changes[usage.start] = changes.get(usage.start, 0) + amount
                changes[usage.stop] = changes.get(usage.stop, 0) - amount
    usual = problem.usage_limit or 0
    missing = {time: usual - limit for time, limit in problem.other_limits.items()}
    in_use, peak, peak_time, worst = 0, 0, 0, 0
    for time in sorted(changes):
        in_use += changes[time]
        over = in_use + missing.get(time, 0)
        if over > worst:
            peak, peak_time, worst = in_use, time, over
    return peak, peak_time
