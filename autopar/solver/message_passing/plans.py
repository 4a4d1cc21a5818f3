"""Plans of the core: dives under prices for memory, and what they cost.

A dive passes messages over the nodes that are free, fixes the tenth of them whose choice is the
clearest, and goes on with the rest, with prices following what the plan takes. Prices and messages
of the ascent are so good a start that a few sweeps do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import BoolArray, FloatArray, IntArray
from autopar.solver.message_passing import tree_moves
from autopar.solver.message_passing.ascent import moved
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.bound import Guide
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.memory import MemoryPrices


@dataclass(frozen=True, slots=True, eq=False)
class FoundPlan:
    """A plan of the core, its cost (exact, without what settled nodes cost; `FORBIDDEN` or more
    where it is not allowed) and how far it exceeds the limit at each time."""

    choice: IntArray
    cost: int
    excess: FloatArray

    @property
    def fits(self) -> bool:
        """Whether the limit on memory is kept."""
        return not len(self.excess) or float(self.excess.max()) <= 0


@dataclass(frozen=True, slots=True)
class Dive:
    """How to dive: the part of the free nodes that is fixed at a time, the sweeps (up and down)
    before that, the worth of a step of the prices as a part of the bound, and the noise in what
    counts as clear."""

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

    def price(self, choice: IntArray) -> FoundPlan:
        """`choice` as a plan."""
        cost = kernels.cost_of(self.core, choice)
        return FoundPlan(choice, int(cost), self.memory.excess(choice))

    def dive(
        self, start: IntArray, free: BoolArray, guide: Guide, multipliers: FloatArray, how: Dive
    ) -> list[FoundPlan]:
        """Decides the `free` nodes again. Returns the last plan, after the cheapest of those on the
        way that keep the limit, if there was one."""
        core = self.core
        choice, message, free = start.copy(), guide.message.copy(), free.copy()
        on_the_way: FoundPlan | None = None
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
        plan: FoundPlan,
        prices: FloatArray,
        factors: FloatArray,
        starts: IntArray,
        moves: int,
        most_nodes: int,
    ) -> FoundPlan:
        """`plan` after moves of trees around any of `starts`, each to where cost plus one of
        `factors` times `prices` (per label) is least. It keeps within the limit and does not raise
        cost plus prices, or, above the limit, does not raise the peak."""
        core = self.core
        choice = plan.choice.copy()
        tree, size = self.memory.peak_tree(choice)
        tree_moves.move_trees(
            core, starts, moves, most_nodes, self._state, core.limit if core.num_times else 0,
            self._cost, prices, tree, size, choice, factors,
        )  # fmt: skip
        return self.price(choice)
