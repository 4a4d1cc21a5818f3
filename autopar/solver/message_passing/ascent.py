"""Raises a lower bound for the core: message passing on the costs, a price per time for memory.

Message passing (TRW-S) raises the bound (`pairwise.bound`) over splits of costs; the prices go up
where the plans it reads off take more than the limit, and down where they take less (a subgradient,
averaged over the last plans).
"""

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FloatArray
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.bound import Guide
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.memory import MemoryPrices

_FIRST_STEP = 0.02
_LEAST_STEP = 1e-6
_AGAIN = 1e-3
"""The step that is taken when steps have become too small, while the bound still rises by
`_PROGRESS` from one such time to the next."""
_SHRINK = 0.7
_PATIENCE = 20
_PROGRESS = 1e-4
_AVERAGE = 0.95
_HELD = 20


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
