"""Raises a lower bound for the core, and proves by it that no plan keeps the limit.

Message passing (TRW-S) raises the bound (`pairwise.bound`) over splits of costs. Prices rise where
the plans that it reads off exceed the limit, and fall where they take less (a subgradient, averaged
over the last plans).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FORBIDDEN, FloatArray, IntArray
from autopar.solver.clock import Clock
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.bound import Guide, MemoryPrices, certify
from autopar.solver.pairwise.core import Core

_FIRST_STEP = 0.02
_LEAST_STEP = 1e-6
_RESTART_STEP = 1e-3
"""The step size after steps have become too small, while the bound still rises by `_PROGRESS` from
one restart to the next."""
_SHRINK = 0.7
_PATIENCE = 20
_PROGRESS = 1e-4
_AVERAGE = 0.95
_HELD = 20


class Ascent:
    """The best prices and messages so far, and those of the next step."""

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
    def has_converged(self) -> bool:
        """Whether steps have become too small to matter."""
        return self._step <= _LEAST_STEP

    def advance(self) -> None:
        """One step of the prices, after sweeps that adapt the messages."""
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
                self._step, self._last_end = _RESTART_STEP, best.bound
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


# Proof that no plan of the core keeps the limit, and the times at which memory is short.
#
# Without costs, every plan that keeps the limit costs 0. A lower bound above 0 on that problem, in
# exact arithmetic, is therefore a proof that there is none. Its prices show where memory is short.
# Times are then left out as long as the others suffice for a proof.

_STEPS = 300
_TOO_MUCH = 2.0**20
_MOST_TIMES = 16


@dataclass(frozen=True, slots=True)
class Shortage:
    """The limits at these `times` (indices) cannot all be kept. `needed[i]` bytes are a lower bound
    at `times[i]` by itself, which is in conflict alone if that exceeds the limit."""

    times: tuple[int, ...]
    needed: tuple[int, ...]


def find_shortage(core: Core, memory: MemoryPrices, clock: Clock) -> Shortage | None:
    """The shortage if one can be proved, else None."""
    bare = core._replace(
        cost=np.zeros_like(core.cost),
        pool=np.where(core.pool >= FORBIDDEN, FORBIDDEN, 0),
        float_pool=np.where(core.pool >= FORBIDDEN, _TOO_MUCH, 0.0),
        lean_pool=np.where(core.lean_pool >= core.too_much, _TOO_MUCH, 0.0),
        fixed_cost=0,
        too_much=_TOO_MUCH,
    )
    guide = _prove(bare, np.arange(core.num_times), clock)
    if guide is None:
        return None
    ranked = np.argsort(-guide.multipliers, kind="stable")
    for count in (1, 2, 4, 8, _MOST_TIMES):
        some = np.sort(ranked[:count])
        if _prove(bare, some, clock) is not None:
            return _shortage(bare, memory, _needed_for_proof(bare, some, clock))
    return _shortage(bare, memory, np.flatnonzero(guide.multipliers))


def _prove(bare: Core, times: IntArray, clock: Clock) -> Guide | None:
    """Prices at `times` alone that prove a shortage."""
    watched = np.zeros(bare.num_times, dtype=np.bool_)
    watched[times] = True
    # Where a time is not watched, nothing is ever short, and its price stays 0.
    core = bare._replace(base=np.where(watched, bare.base, -(1 << 60)))
    memory = MemoryPrices(core)
    ascent = Ascent(core, memory)
    for step in range(_STEPS):
        if ascent.has_converged or clock.expired:
            break
        ascent.advance()
        if step % 10 == 9 and certify(core, memory, ascent.best) > 0:
            return ascent.best
    return None


def _needed_for_proof(bare: Core, times: IntArray, clock: Clock) -> IntArray:
    for time in times.tolist():
        fewer = times[times != time]
        if len(times) > 1 and _prove(bare, fewer, clock) is not None:
            times = fewer
    return times


def _shortage(bare: Core, memory: MemoryPrices, times: IntArray) -> Shortage:
    needed: list[int] = []
    for time in times[:_MOST_TIMES].tolist():
        multipliers = np.zeros(bare.num_times)
        multipliers[time] = 1.0
        ascent = Ascent(bare, memory)
        ascent.hold(multipliers)
        needed.append(bare.limit + certify(bare, memory, ascent.best))
    return Shortage(tuple(times[:_MOST_TIMES].tolist()), tuple(needed))
