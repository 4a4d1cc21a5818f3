"""Proof that no plan of the core keeps the limit, and at which times that shows.

Without costs, every plan that keeps the limit costs 0. A lower bound above 0 on that problem, added
up exactly, is therefore a proof that there is none; the prices it was found with say where memory
is short. Times are then left out until those that remain are needed for the proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FORBIDDEN, IntArray
from autopar.solver.clock import Clock
from autopar.solver.message_passing.ascent import Ascent
from autopar.solver.pairwise.bound import Guide, certify
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.memory import MemoryPrices

_STEPS = 300
_TOO_MUCH = 2.0**20
_MOST_TIMES = 16


@dataclass(frozen=True, slots=True)
class Shortage:
    """The limits at these `times` (indices) cannot all be kept; `needed[i]` bytes are the least at
    time `times[i]` by itself. One time alone is in conflict when that exceeds the limit."""

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
        if ascent.settled or clock.expired:
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
