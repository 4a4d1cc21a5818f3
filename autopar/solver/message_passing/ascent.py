"""A lower bound for the core: message passing on the costs, a price per time for memory.

For any prices `p >= 0` of a byte at each time, a plan within the limit costs at least

    min over plans of (cost + sum_t p_t use_t) - sum_t p_t limit,

and any split of costs between nodes and edges (`message`) bounds that minimum from below by the sum
of the least of every node and every edge. Message passing (TRW-S) raises the bound over splits; the
prices go up where the plans it reads off take more than the limit, and down where they take less (a
subgradient, averaged over the last plans). Whatever came of that in floating point, `certify`
rounds prices and messages to integers and adds the bound up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FloatArray
from autopar.solver.message_passing import kernels
from autopar.solver.message_passing.core import Core
from autopar.solver.message_passing.memory import MemoryPrices

_FIRST_STEP = 0.02
_LEAST_STEP = 1e-6
_AGAIN = 1e-3
"""The step that is taken when steps have become too small, while the bound still rises by
`_PROGRESS` from one such time to the next."""
_SHRINK = 0.7
_PATIENCE = 20
_PROGRESS = 1e-4
_AVERAGE = 0.95
_HELD = 10
_COST_BITS = 50
_MULTIPLIER_BITS = 61
_MOST_PAID = 2.0**50


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """Prices and messages that steer the search for plans, and the bound they prove (without what
    settled nodes cost). `unit` is the cost against which steps of the prices are measured."""

    multipliers: FloatArray
    message: FloatArray
    bound: float
    unit: float


class Ascent:
    """The best prices and messages so far, and the ones it tries next."""

    def __init__(self, core: Core, memory: MemoryPrices) -> None:
        self.core = core
        self.memory = memory
        counts = np.diff(core.first)
        size = int((counts[core.source] + counts[core.target]).sum())
        everything = np.arange(core.num_nodes)
        self.best: Guide = Guide(np.zeros(core.num_times), np.zeros(size), float("-inf"), 0.0)
        self.plan = np.zeros(core.num_nodes, dtype=np.int64)
        self._order, self._free = everything, np.ones(core.num_nodes, dtype=np.bool_)
        self._margin = np.zeros(core.num_nodes)
        self._multipliers: FloatArray = self.best.multipliers
        self._message: FloatArray = self.best.message.copy()
        self._cost = core.cost.astype(np.float64)
        self._average: FloatArray | None = None
        self._least_unit = float(np.median(core.cost[core.cost > 0])) if core.cost.any() else 1.0
        self._step = _FIRST_STEP
        self._idle = 0
        self._last_end = float("-inf")

    @property
    def settled(self) -> bool:
        """Whether steps have become too small to matter."""
        return self._step <= _LEAST_STEP

    def advance(self) -> None:
        """One step of the prices, after sweeps that let the messages follow."""
        bound = self._sweep()
        excess = self.memory.excess(self.plan)
        if self._average is None:
            self._average = excess
        self._average = _AVERAGE * self._average + (1 - _AVERAGE) * excess
        self._judge(bound)
        self._multipliers = moved(
            self._multipliers, self._average, self._step * self.best.unit, self.core.limit
        )

    def hold(self, multipliers: FloatArray) -> None:
        """Raises the bound at these prices, for a few sweeps."""
        self._multipliers = multipliers
        for _ in range(_HELD):
            self._judge(self._sweep())

    def _sweep(self) -> float:
        core = self.core
        theta = self._cost + self.memory.prices(self._multipliers)
        bound = 0.0
        for upward in (False, True):
            bound = kernels.sweep(
                core, upward, self._order, self._free, theta, self._message, self.plan,
                self._margin,
            )  # fmt: skip
        return bound + float(self._multipliers @ (core.base - core.limit))

    def _judge(self, bound: float) -> None:
        best = self.best
        self._idle += 1
        if bound > best.bound:
            if bound > best.bound + _PROGRESS * abs(bound) or not np.isfinite(best.bound):
                self._idle = 0
            unit = max(abs(bound), self._least_unit)
            self.best = Guide(self._multipliers, self._message.copy(), bound, unit)
        if self._idle > _PATIENCE:
            self._step *= _SHRINK
            if self._step <= _LEAST_STEP and best.bound > self._last_end + _PROGRESS * abs(
                best.bound
            ):
                self._step, self._last_end = _AGAIN, best.bound
            self._idle = 0
            self._multipliers = self.best.multipliers
            self._message = self.best.message.copy()


def moved(multipliers: FloatArray, excess: FloatArray, worth: float, limit: int) -> FloatArray:
    """The multipliers after a step along `excess` that raises a linear bound by `worth`."""
    usable = np.where((multipliers <= 0) & (excess < 0), 0.0, excess)
    square = float(usable @ usable)
    if square <= 0:
        return multipliers
    return np.maximum(0.0, multipliers + worth / square / max(1, limit) * usable)


def certify(core: Core, memory: MemoryPrices, guide: Guide) -> int:
    """The lower bound that `guide` proves, in exact arithmetic, with what settled nodes cost."""
    # Any prices of at least 0 prove a bound; those too large for integers are brought down.
    total = float(guide.multipliers.sum())
    multipliers = guide.multipliers * min(1.0, _MOST_PAID / max(total, 1.0))
    fine = _MULTIPLIER_BITS - int(min(total, _MOST_PAID) + 1).bit_length()
    bits = max(0, min(fine, _COST_BITS - int(core.too_much).bit_length()))
    multipliers = np.floor(multipliers * 2.0**fine).astype(np.int64)
    most = int(core.too_much) << (bits + 2)
    theta = (core.cost << bits) + memory.floors(multipliers, fine - bits, most)
    largest = 2.0 ** (_COST_BITS + 5)
    message = np.rint(np.clip(guide.message * 2.0**bits, -largest, largest)).astype(np.int64)
    of_nodes, of_edges = kernels.least(core, theta, bits, message)
    value = sum(of_nodes.tolist()) + sum(of_edges.tolist())
    room = (core.limit - core.base).tolist()
    paid = sum(k * r for k, r in zip(multipliers.tolist(), room, strict=True) if k)
    # Both parts as multiples of 2**-fine; the quotient is rounded up, as costs are integers.
    exact = (value << (fine - bits)) - paid
    return -((-exact) >> fine) + core.fixed_cost
