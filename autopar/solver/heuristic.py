"""Plans without proof: coordinate descent from a given start, with memory as a price or a wall.

One node at a time takes its cheapest choice while all others stay. The figures steer in floating
point and price a sink's move by attaching it to what its flow already reaches; whether a plan is
feasible and what it costs is `evaluate`'s word alone. Deterministic: fixed order, no random start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.problem import FORBIDDEN, Flow, Problem
from autopar.solver.distances import all_distances
from autopar.solver.evaluate import Evaluation, Evaluator
from autopar.solver.memory import live_sets
from autopar.solver.search import Clock

FloatArray = npt.NDArray[np.float64]

_PROHIBITIVE = 1e30
_MAX_SWEEPS = 20
_MAX_PRICES = 60


class Descent:
    """Coordinate descent on one problem."""

    def __init__(self, problem: Problem, evaluator: Evaluator, clock: Clock) -> None:
        self.problem = problem
        self.evaluator = evaluator
        self.clock = clock
        self._costs = [_priced(costs) for costs in problem.costs]
        self._edges: list[list[tuple[int, FloatArray]]] = [[] for _ in problem.keys]
        for edge in problem.edges:
            cost = _priced(edge.cost)
            self._edges[edge.source].append((edge.target, cost))
            self._edges[edge.target].append((edge.source, cost.T))
        self._made: list[list[int]] = [[] for _ in problem.keys]
        self._used: list[list[tuple[int, int]]] = [[] for _ in problem.keys]
        for f, flow in enumerate(problem.flows):
            self._made[flow.source].append(f)
            for k, sink in enumerate(flow.sinks):
                self._used[sink.node].append((f, k))
        self._distances = [_priced(d) for d in all_distances(problem.flows)]
        sets = live_sets(problem) if problem.usage_limit is not None else []
        times = np.array([time for time, _ in sets], dtype=np.int64)
        self._spans = [
            slice(*np.searchsorted(times, span).tolist()) if span[0] < span[1] else slice(0, 0)
            for span in problem.intervals
        ]
        self._num_times = len(sets)

    def improve(self, start: Sequence[int]) -> tuple[tuple[int, ...], Evaluation] | None:
        """The best feasible choice found from `start`, with its evaluation; None if none was."""
        choice = list(start)
        if not self._fits(choice) and not self._make_fit(choice):
            return None
        self._settle(choice, price=0.0, wall=True)
        evaluation = self.evaluator(choice)
        return (tuple(choice), evaluation) if evaluation.feasible else None

    def cheapest(self) -> tuple[int, ...]:
        """Every node's cheapest choice by itself."""
        return tuple(int(np.argmin(costs)) for costs in self._costs)

    def leanest(self) -> tuple[int, ...]:
        """Every node's choice of least usage that is not forbidden, the cheapest of those."""
        return tuple(
            int(np.lexsort((costs, np.where(costs >= _PROHIBITIVE, np.inf, usages)))[0])
            for costs, usages in zip(self._costs, self.problem.usages, strict=True)
        )

    def _make_fit(self, choice: list[int]) -> bool:
        """Raises the price of a byte until what is chosen fits."""
        usages = self.problem.usages
        spread = max(float(np.ptp(u)) for u in usages) or 1.0
        price = max(
            float(np.ptp(c[c < _PROHIBITIVE])) for c in self._costs if c.min() < _PROHIBITIVE
        )
        price = max(price, 1.0) / spread / 2**20
        for _ in range(_MAX_PRICES):
            self._settle(choice, price, wall=False)
            if self._fits(choice):
                return True
            price *= 2
        return False

    def _settle(self, choice: list[int], price: float, wall: bool) -> None:
        """Sweeps over the nodes until none wants to move, or the time is up."""
        in_use = self._usage(choice)
        for _ in range(_MAX_SWEEPS):
            moved = False
            for node, span in enumerate(self._spans):
                if wall and self.clock.expired:
                    return
                usages = self.problem.usages[node]
                costs = self._alternatives(node, choice)
                old = choice[node]
                if wall and self._num_times and in_use[span].size:
                    room = self._limit() - int(in_use[span].max()) + int(usages[old])
                    costs = np.where(usages <= room, costs, np.inf)
                elif price:
                    costs = costs + price * usages
                new = int(np.argmin(costs))
                if costs[new] < costs[old]:
                    in_use[span] += int(usages[new]) - int(usages[old])
                    choice[node] = new
                    moved = True
            if not moved:
                return

    def _alternatives(self, node: int, choice: Sequence[int]) -> FloatArray:
        """What each choice of `node` costs while the others stay as they are."""
        costs = self._costs[node].copy()
        for other, matrix in self._edges[node]:
            costs += matrix[:, choice[other]]
        for f in self._made[node]:
            costs += self._as_source(f, choice)
        for f, k in self._used[node]:
            costs += self._as_sink(f, k, choice)
        return costs

    def _as_source(self, f: int, choice: Sequence[int]) -> FloatArray:
        flow = self.problem.flows[f]
        terminals = frozenset(_asked(flow, choice))
        lengths = self.evaluator.routers[f].lengths(terminals)
        if lengths is None:
            by_state = self._distances[f][:, sorted(terminals)].sum(axis=1)
        else:
            by_state = np.minimum(np.array(lengths, dtype=np.float64), _PROHIBITIVE)
        # A state of -1 picks the last entry: nothing is made.
        absent = _PROHIBITIVE if terminals else 0.0
        return np.append(by_state, absent)[flow.source_state]

    def _as_sink(self, f: int, k: int, choice: Sequence[int]) -> FloatArray:
        flow = self.problem.flows[f]
        root = int(flow.source_state[choice[flow.source]])
        reached = {root} - {-1}
        others = frozenset(_asked(flow, choice, leave_out=k))
        route = self.evaluator.routers[f].route(root, others) if root >= 0 else None
        if route is not None:
            reached |= {int(flow.heads[a]) for a in route.arcs}
        near = np.full(len(flow.states), _PROHIBITIVE)
        if reached:
            near = self._distances[f][sorted(reached)].min(axis=0)
        return np.append(near, 0.0)[flow.sinks[k].state]

    def _limit(self) -> int:
        assert self.problem.usage_limit is not None
        return self.problem.usage_limit

    def _usage(self, choice: Sequence[int]) -> npt.NDArray[np.int64]:
        in_use = np.zeros(self._num_times, dtype=np.int64)
        for span, usages, c in zip(self._spans, self.problem.usages, choice, strict=True):
            in_use[span] += usages[c]
        return in_use

    def _fits(self, choice: Sequence[int]) -> bool:
        return not self._num_times or int(self._usage(choice).max()) <= self._limit()


def _asked(flow: Flow, choice: Sequence[int], leave_out: int = -1) -> set[int]:
    """The states the sinks ask for, but for sink number `leave_out`."""
    states = {
        int(sink.state[choice[sink.node]]) for k, sink in enumerate(flow.sinks) if k != leave_out
    }
    return states - {-1}


def _priced(costs: npt.NDArray[np.int64]) -> FloatArray:
    return np.where(costs >= FORBIDDEN, _PROHIBITIVE, costs.astype(np.float64))
