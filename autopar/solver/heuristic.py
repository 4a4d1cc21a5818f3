"""Plans without proof: coordinate descent, with memory as a price or a hard limit.

One node at a time takes its cheapest choice while all others stay. Prices are in floating point,
and price a sink's move by a path from the nearest state that its flow already reaches. `evaluate`
alone decides whether a plan is feasible and what it costs. Deterministic: fixed order, no random
start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import networkx as nx
import numpy as np
import numpy.typing as npt

from autopar.ir.grouping import grouped
from autopar.ir.problem import FORBIDDEN, FloatArray, Problem
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluation, Evaluator
from autopar.solver.memory import live_sets, total_usages
from autopar.solver.routing import all_distances
from autopar.solver.windows import Shares, first_shares, weighed

_PROHIBITIVE = 1e30
_UNDECIDED = -1
_MAX_SWEEPS = 20
_MAX_PRICES = 60
_FIRST_PRICE = 2.0**-12


class Descent:
    """Coordinate descent on one problem, from its own starts or a given one."""

    def __init__(
        self, problem: Problem, evaluator: Evaluator, clock: Clock, shares: Shares | None = None
    ) -> None:
        """Moves are compared with the savings of windows in these `shares`."""
        self.problem = problem
        self.clock = clock
        self._evaluator = evaluator
        steered = weighed(problem, shares or first_shares(problem)) if problem.windows else problem
        self._prices = _Prices(steered, Evaluator(steered) if problem.windows else evaluator)
        sets = live_sets(problem) if problem.usage_limit is not None else []
        times = np.array([time for time, _ in sets], dtype=np.int64)
        self._usages = [
            [
                (slice(*np.searchsorted(times, (usage.start, usage.stop)).tolist()), usage.amounts)
                for usage in usages
                if usage.start < usage.stop and len(times)
            ]
            for usages in problem.usages
        ]
        self._sizes = total_usages(problem)
        self._limits = np.array([problem.limit_at(time) for time, _ in sets], dtype=np.int64)

    def improve(self, start: Sequence[int]) -> tuple[tuple[int, ...], Evaluation] | None:
        """The feasible choice that descent from `start` ends at, with its evaluation, or None."""
        choice = list(start)
        self._prices.forget()
        if not self._fits(choice) and not self._make_fit(choice):
            return None
        self._settle(choice, price=0.0, wall=True, sweeps=_MAX_SWEEPS)
        evaluation = self._evaluator(choice)
        return (tuple(choice), evaluation) if evaluation.feasible else None

    def smallest_memory(self) -> tuple[int, ...]:
        """Every node's allowed choice of least usage, the cheapest of equal ones."""
        return tuple(
            int(np.lexsort((costs, np.where(costs >= FORBIDDEN, np.inf, sizes)))[0])
            for costs, sizes in zip(self.problem.costs, self._sizes, strict=True)
        )

    def grown(self) -> tuple[int, ...]:
        """Decides node after node, each given the decided ones, in breadth-first order."""
        choice = [_UNDECIDED] * len(self.problem.keys)
        by_spread = sorted(
            range(len(choice)), key=lambda i: (-int(np.ptp(self.problem.costs[i])), i)
        )
        self._prices.forget()
        graph = nx.Graph(dict(enumerate(self._prices.neighbours)))
        for first in by_spread:
            if choice[first] == _UNDECIDED:
                for node in (first, *(other for _, other in nx.bfs_edges(graph, first))):
                    choice[node] = int(np.argmin(self._prices(node, choice)))
                    self._prices.moved(node)
        return tuple(choice)

    def _make_fit(self, choice: list[int]) -> bool:
        """Raises the price of a byte until the choice fits in memory."""
        spread = max(float(np.ptp(sizes)) for sizes in self._sizes) or 1.0
        costs = (c[c < FORBIDDEN] for c in self.problem.costs)
        price = max([1.0, *(float(np.ptp(c)) for c in costs if len(c))]) / spread * _FIRST_PRICE
        for _ in range(_MAX_PRICES):
            self._settle(choice, price, wall=False, sweeps=1)
            if self._fits(choice):
                return True
            price *= 2
        return False

    def _settle(self, choice: list[int], price: float, *, wall: bool, sweeps: int) -> None:
        """Sweeps over the nodes until no move helps, or (with `wall`) the time is up."""
        in_use = self._usage(choice)
        for _ in range(sweeps):
            moved = False
            for node, usages in enumerate(self._usages):
                if wall and self.clock.expired:
                    return
                costs = self._prices(node, choice)
                old = choice[node]
                if wall:
                    for span, amounts in usages:
                        room = int((self._limits - in_use)[span].min()) + int(amounts[old])
                        costs = np.where(amounts <= room, costs, np.inf)
                elif price:
                    costs = costs + price * self._sizes[node]
                new = int(np.argmin(costs))
                if costs[new] < costs[old]:
                    for span, amounts in usages:
                        in_use[span] += int(amounts[new]) - int(amounts[old])
                    choice[node] = new
                    self._prices.moved(node)
                    moved = True
            if not moved:
                return

    def _usage(self, choice: Sequence[int]) -> npt.NDArray[np.int64]:
        in_use = np.zeros(len(self._limits), dtype=np.int64)
        for usages, c in zip(self._usages, choice, strict=True):
            for span, amounts in usages:
                in_use[span] += amounts[c]
        return in_use

    def _fits(self, choice: Sequence[int]) -> bool:
        return bool((self._usage(choice) <= self._limits).all())


class _Prices:
    """Per node, the cost of each of its choices while the other nodes stay as they are.

    `_UNDECIDED` nodes cost nothing and read nothing. Prices are cached until a neighbour moves.
    """

    def __init__(self, problem: Problem, evaluator: Evaluator) -> None:
        self.problem = problem
        self._evaluator = evaluator
        self._known: dict[int, FloatArray] = {}
        self._consumers: dict[int, Counter[int]] = {}
        count = len(problem.keys)
        self._costs = [_priced(costs) for costs in problem.costs]
        self._edges: list[list[tuple[int, FloatArray]]] = [[] for _ in range(count)]
        self._flows_from = grouped((flow.source, f) for f, flow in enumerate(problem.flows))
        self._used = grouped(
            (sink.node, (f, k))
            for f, flow in enumerate(problem.flows)
            for k, sink in enumerate(flow.sinks)
        )
        near: list[set[int]] = [set() for _ in range(count)]
        for edge in problem.edges:
            cost = _priced(edge.cost)
            self._edges[edge.source].append((edge.target, cost))
            self._edges[edge.target].append((edge.source, cost.T))
            near[edge.source].add(edge.target)
            near[edge.target].add(edge.source)
        for flow in problem.flows:
            ends = {flow.source, *(sink.node for sink in flow.sinks)}
            for node in ends:
                near[node] |= ends
        self.neighbours = [sorted(others) for others in near]
        self._distances = [_priced(d) for d in all_distances(problem.flows)]
        self._source_states: list[list[int]] = [f.source_state.tolist() for f in problem.flows]
        self._sink_states: list[list[tuple[int, list[int]]]] = [
            [(sink.node, sink.state.tolist()) for sink in flow.sinks] for flow in problem.flows
        ]
        self._heads: list[list[int]] = [f.heads.tolist() for f in problem.flows]

    def __call__(self, node: int, choice: Sequence[int]) -> FloatArray:
        """The costs of the choices of `node`; not to be written to."""
        if node not in self._known:
            costs = self._costs[node].copy()
            for other, matrix in self._edges[node]:
                if choice[other] != _UNDECIDED:
                    costs += matrix[:, choice[other]]
            for f in self._flows_from.get(node, ()):
                costs += self._as_source(f, choice)
            for f, k in self._used.get(node, ()):
                costs += self._as_sink(f, k, choice)
            self._known[node] = costs
        return self._known[node]

    def moved(self, node: int) -> None:
        """Takes note that `node` has another choice."""
        for other in self.neighbours[node]:
            self._known.pop(other, None)
        for f, _ in self._used.get(node, ()):
            self._consumers.pop(f, None)

    def forget(self) -> None:
        """Takes note that any node may have another choice."""
        self._known.clear()
        self._consumers.clear()

    def _as_source(self, f: int, choice: Sequence[int]) -> FloatArray:
        terminals = frozenset(self._consumer_states(f, choice))
        lengths = self._evaluator.routers[f].lengths(terminals)
        if lengths is None:
            by_state = self._distances[f][:, sorted(terminals)].sum(axis=1)
        else:
            by_state = np.minimum(np.array(lengths, dtype=np.float64), _PROHIBITIVE)
        # A state of -1, for which no tensor is made, picks the last entry.
        absent = _PROHIBITIVE if terminals else 0.0
        return np.append(by_state, absent)[self.problem.flows[f].source_state]

    def _as_sink(self, f: int, k: int, choice: Sequence[int]) -> FloatArray:
        flow = self.problem.flows[f]
        states = flow.sinks[k].state
        if choice[flow.source] == _UNDECIDED:
            return np.zeros(len(states))
        root = self._source_states[f][choice[flow.source]]
        if root < 0:
            return np.where(states < 0, 0.0, _PROHIBITIVE)
        counts, own = self._consumer_states(f, choice), self._state_of(f, k, choice)
        others = frozenset(state for state, count in counts.items() if count > (state == own))
        route = self._evaluator.routers[f].route(root, others)
        heads = self._heads[f]
        reached = {root} if route is None else {root, *(heads[a] for a in route.arcs)}
        near = self._distances[f][sorted(reached)].min(axis=0)
        return np.append(near, 0.0)[states]

    def _consumer_states(self, f: int, choice: Sequence[int]) -> Counter[int]:
        """The number of decided sinks of flow `f` by the state they need: a weight used in every
        step of a loop may have thousands."""
        if f not in self._consumers:
            states = (self._state_of(f, k, choice) for k in range(len(self._sink_states[f])))
            self._consumers[f] = Counter(state for state in states if state >= 0)
        return self._consumers[f]

    def _state_of(self, f: int, k: int, choice: Sequence[int]) -> int:
        """The state that sink `k` of flow `f` needs, below 0 if none."""
        node, states = self._sink_states[f][k]
        return -1 if choice[node] == _UNDECIDED else states[choice[node]]


def _priced(costs: npt.NDArray[np.int64]) -> FloatArray:
    return np.where(costs >= FORBIDDEN, _PROHIBITIVE, costs.astype(np.float64))
