"""Plans of the core: dives under prices for memory, and moves that improve them.

A dive passes messages over the free nodes, fixes the tenth of them whose choices are clearest, and
goes on with the rest, while prices follow the plan's memory. Prices and messages of the ascent are
so good a start that a few sweeps do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, FloatArray, IntArray
from autopar.solver.clock import Clock
from autopar.solver.message_passing import tree_moves
from autopar.solver.message_passing.ascent import moved
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.bound import Guide, MemoryPrices
from autopar.solver.pairwise.core import Core


@dataclass(frozen=True, slots=True, eq=False)
class LiftedPlan:
    """A plan of the core, its cost and its excess over the limit at each time. The cost is exact,
    without that of settled nodes, and `FORBIDDEN` or more if the plan is not allowed."""

    choice: IntArray
    cost: int
    excess: FloatArray

    @property
    def fits(self) -> bool:
        """Whether the limit on memory is kept."""
        return not len(self.excess) or float(self.excess.max()) <= 0


@dataclass(frozen=True, slots=True)
class Dive:
    """Parameters of a dive. `part` of the free nodes is fixed at a time, after `sweeps` up and
    down. `step` is the worth of a step of the prices as a part of the bound, and `noise` that of
    the margins of choices."""

    part: float = 0.1
    sweeps: int = 2
    step: float = 0.0003
    noise: float = 0.5


class Planner:
    """Makes and changes plans of one core."""

    def __init__(self, core: Core, memory: MemoryPrices, seed: int = 0) -> None:
        self.core = core
        self.memory = memory
        self.random = np.random.default_rng(seed)
        self._cost = core.cost.astype(np.float64)
        self._priced = np.zeros(len(core.cost))
        self._margin = np.zeros(core.num_nodes)
        self._state = np.array([seed + 1])

    def price(self, choice: IntArray) -> LiftedPlan:
        """`choice` as a plan."""
        cost = kernels.cost_of(self.core, choice)
        return LiftedPlan(choice, int(cost), self.memory.excess(choice))

    def dive(
        self, start: IntArray, free: BoolArray, guide: Guide, multipliers: FloatArray, how: Dive
    ) -> list[LiftedPlan]:
        """Decides the `free` nodes anew. Returns the last plan, before it the cheapest earlier one
        that keeps the limit, if there was one."""
        core = self.core
        choice, message, free = start.copy(), guide.message.copy(), free.copy()
        on_the_way: LiftedPlan | None = None
        order = np.flatnonzero(free)
        while True:
            theta = self._cost + self.memory.prices(multipliers, order, self._priced)
            for _ in range(how.sweeps):
                for upward in (False, True):
                    kernels.sweep(core, upward, order, free, theta, message, choice, self._margin)
            plan = self.price(choice)
            if plan.fits and (on_the_way is None or plan.cost < on_the_way.cost):
                on_the_way = self.price(choice.copy())
            noise = self.random.uniform(1 - how.noise, 1 + how.noise, len(order))
            clear = self._margin[order] * noise
            count = max(1, int(np.ceil(how.part * len(order))))
            free[order[np.argpartition(-clear, count - 1)[:count]]] = False
            order = np.flatnonzero(free)
            if not len(order):
                return [p for p in (on_the_way, plan) if p is not None]
            if how.step:
                worth = how.step * guide.unit
                multipliers = moved(multipliers, plan.excess, worth, core.limit)

    def walk(
        self,
        plan: LiftedPlan,
        prices: FloatArray,
        factors: FloatArray,
        starts: IntArray,
        moves: int,
        most_nodes: int,
    ) -> LiftedPlan:
        """`plan` after moves of trees around any of `starts`. Each move minimizes cost plus one of
        `factors` times `prices` (per label). It keeps the limit and does not raise cost plus
        prices; above the limit, it does not raise the peak."""
        core = self.core
        choice = plan.choice.copy()
        tree, size = self.memory.peak_tree(choice)
        tree_moves.move_trees(
            core, starts, moves, most_nodes, self._state, core.limit if core.num_times else 0,
            self._cost, prices, tree, size, choice, factors,
        )  # fmt: skip
        return self.price(choice)


# Improvement of plans: a first one that fits, then changes of it, then new ones.
#
# A *dive* decides nodes anew under the prices and messages of the bound, over long distances.
# *Moves* of trees are exact on each tree with all else fixed, keep the limit, and reach few nodes.
# Plans of dives alone still improve much by moves, and moves alone end in local optima. So moves
# around the decided nodes follow every dive.

_TRIALS = 20
_CYCLE, _FRESH, _BEST_AT = 10, 3, 7
"""In a cycle of `_CYCLE` rounds, the first `_FRESH` make new plans. The next ones change the best
of these, and from round `_BEST_AT` on the best of all."""
_MAY_RESTART, _NEWS = 5, 0.02
"""From this round of a cycle on, a bound that has risen by this part starts a new cycle."""
_FRESH_FACTORS, _PLAIN = (1.0, 1.02, 0.98, 1.05, 1.2, 1.1), 3
"""Factors on the prices for new plans. After `_PLAIN` times through all, prices are noisy too."""
_FIRST_DIVES, _EAGER = 12, 4.0
"""The most new plans in a round until one fits. In each, prices rise `_EAGER` times as fast."""
_REPAIRS, _DEARER, _GROWTH = 20, 0.002, 1.3
"""The most rises of the prices for a plan above the limit; the worth of the first rise as a part of
the bound; and the factor from one rise to the next."""
_PARTS = (0.01, 0.03, 0.1, 0.3)
_LEAST_PART = 20
"""Parts of the nodes that are decided anew, and the smallest number of nodes."""
_NOISE, _FRESH_NOISE = (0.5, 1.5), (0.9, 1.1)
_FACTORS = (0.7, 0.9, 1.0, 1.1)
_DIVES = (
    Dive(0.1, 2, 0.0003),
    Dive(0.3, 1, 0.0003),
    Dive(0.1, 2, 0.003),
    Dive(0.3, 1, 0.0),
)
_FACTORS_THAT_FIT = np.array([0.0, 0.5, 1.0, 1.0, 2.0])
_FACTORS_THAT_DO_NOT = 4 * _FACTORS_THAT_FIT
"""Factors on the prices of memory for moves of a plan within the limit, and of one above it."""
_TREES = (10, 40, 200, 1000)
"""The most nodes of a tree."""
_LEAST_MOVES = 20
_DESCENTS = 50
_GAIN = 5e-4
"""Moves of all nodes go on while they lower the cost by this part."""


class Improver:
    """One sequence of plans, with random numbers of its own."""

    def __init__(self, core: Core, memory: MemoryPrices, clock: Clock, seed: int) -> None:
        self.core = core
        self.memory = memory
        self.clock = clock
        self.seed = seed
        self.planner = Planner(core, memory, seed)
        self.best: LiftedPlan | None = None
        self._current: LiftedPlan | None = None
        self._phase = 0
        self._num_plans = seed
        self._outdated_at = float("-inf")

    def improve(self, guide: Guide, known: LiftedPlan | None) -> None:
        """One round of work under the prices and messages of `guide`; `known` is the best plan of
        all sequences."""
        self.best = known
        if known is None:
            self._find_plan(guide)
            return
        if guide.bound > self._outdated_at and self._phase >= _MAY_RESTART:
            self._phase = 0
        phase = self._phase
        self._phase = (phase + 1) % _CYCLE
        if phase < _FRESH:
            if phase == 0:
                self._current = None
                self._outdated_at = guide.bound + _NEWS * abs(guide.bound)
            self._make_fresh(guide)
            return
        if self._current is None or phase == _BEST_AT:
            self._current = known
        for _ in range(_TRIALS):
            if self.clock.expired:
                return
            self._change_part(self._current, guide)

    def improve_more(self, guide: Guide) -> None:
        """One more change of the best plan, while the other thread finishes its round."""
        if self.best is None:
            self._find_plan(guide)
        else:
            self._change_part(self.best, guide)

    def _find_plan(self, guide: Guide) -> None:
        """New plans until one fits, each with faster rising prices than the one before."""
        for attempt in range(_FIRST_DIVES):
            self._new_plan(guide, guide.multipliers, _DEARER * _EAGER**attempt)
            if self.best is not None or self.clock.expired:
                return

    def _make_fresh(self, guide: Guide) -> None:
        """A new plan under the current prices, independent of the best one."""
        multipliers = guide.multipliers * _FRESH_FACTORS[self._num_plans % len(_FRESH_FACTORS)]
        if self._num_plans >= _PLAIN * len(_FRESH_FACTORS):
            multipliers = multipliers * self.planner.random.uniform(
                *_FRESH_NOISE, self.core.num_times
            )
        self._num_plans += 1
        plan = self._new_plan(guide, multipliers, _DEARER)
        if plan.fits and plan.cost < FORBIDDEN:
            self._descend(plan, self.memory.prices(guide.multipliers))

    def _new_plan(self, guide: Guide, multipliers: FloatArray, dearer: float) -> LiftedPlan:
        """A dive over all nodes, then moves until the plan is allowed. Prices rise at times above
        the limit; the first rise is worth `dearer`, a part of the bound."""
        everything = np.ones(self.core.num_nodes, dtype=np.bool_)
        start = np.zeros(self.core.num_nodes, dtype=np.int64)
        *on_the_way, plan = self.planner.dive(start, everything, guide, multipliers, _DIVES[0])
        for earlier in on_the_way:
            self._submit(earlier)
        worth = dearer * guide.unit / max(1, self.core.limit)
        for _ in range(_REPAIRS):
            if (plan.fits and plan.cost < FORBIDDEN) or self.clock.expired:
                break
            if not plan.fits:
                over = np.maximum(plan.excess, 0.0)
                multipliers = multipliers + worth * float(over.max()) / float(over @ over) * over
                worth *= _GROWTH
            plan = self._move_all(plan, self.memory.prices(multipliers))
        self._submit(plan)
        return plan

    def _descend(self, plan: LiftedPlan, prices: FloatArray) -> LiftedPlan:
        """`plan`, which fits, after moves of trees around all nodes while they help."""
        for _ in range(_DESCENTS):
            if self.clock.expired:
                break
            before = plan.cost
            plan = self._move_all(plan, prices)
            self._submit(plan)
            if before - plan.cost <= _GAIN * abs(plan.cost):
                break
        return plan

    def _move_all(
        self, plan: LiftedPlan, prices: FloatArray, starts: IntArray | None = None
    ) -> LiftedPlan:
        """`plan` after moves of trees of all sizes around `starts`, or around all nodes."""
        starts = np.arange(self.core.num_nodes) if starts is None else starts
        for tree in _TREES:
            moves = max(_LEAST_MOVES, len(starts) // tree)
            factors = _FACTORS_THAT_FIT if plan.fits else _FACTORS_THAT_DO_NOT
            plan = self.planner.walk(plan, prices, factors, starts, moves, tree)
        return plan

    def _change_part(self, plan: LiftedPlan, guide: Guide) -> None:
        draw = self.planner.random
        size = max(_LEAST_PART, int(self.core.num_nodes * draw.choice(_PARTS)))
        factor = draw.choice(_FACTORS)
        if draw.random() < 0.5:
            factor = factor * draw.uniform(*_NOISE, self.core.num_times)
        how = _DIVES[int(draw.integers(len(_DIVES)))]
        part = self._some_nodes(min(size, self.core.num_nodes))
        *on_the_way, plan = self.planner.dive(
            plan.choice, part, guide, guide.multipliers * factor, how
        )
        for earlier in on_the_way:
            self._submit(earlier)
        prices = self.memory.prices(guide.multipliers)
        self._submit(self._move_all(plan, prices, np.flatnonzero(part)))

    def _submit(self, plan: LiftedPlan) -> None:
        if not plan.fits or plan.cost >= FORBIDDEN:
            return
        if self._current is None or plan.cost < self._current.cost:
            self._current = plan
        if self.best is None or plan.cost < self.best.cost:
            self.best = plan

    def _some_nodes(self, size: int) -> BoolArray:
        """A stretch of `size` nodes in order, or `size` nodes around a random one."""
        core, draw = self.core, self.planner.random
        picked = np.zeros(core.num_nodes, dtype=np.bool_)
        if draw.random() < 0.5:
            begin = int(draw.integers(core.num_nodes - size + 1))
            picked[begin : begin + size] = True
            return picked
        nodes = [int(draw.integers(core.num_nodes))]
        picked[nodes[0]] = True
        for node in nodes:
            for other in self._neighbours(node):
                if len(nodes) < size and not picked[other]:
                    picked[other] = True
                    nodes.append(other)
            if len(nodes) >= size:
                break
        return picked

    def _neighbours(self, node: int) -> list[int]:
        """Up to 20 of the neighbours of `node`, in random order."""
        core = self.core
        edges = core.near_edge[core.near_first[node] : core.near_first[node + 1]]
        others: IntArray = core.source[edges] + core.target[edges] - node
        self.planner.random.shuffle(others)
        return others[:20].tolist()
