"""A lower bound from prices and messages, whatever they are, in exact arithmetic.

For any prices `p >= 0` of a byte at each time, a plan within the limit costs at least

    min over plans of (cost + sum_t p_t use_t) - sum_t p_t limit,

and any split of costs between nodes and edges (`message`) bounds that minimum from below by the sum
of the least of every node and every edge. Whatever they came to in floating point, `certify` rounds
prices and messages to integers and adds the bound up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FloatArray
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.memory import MemoryPrices

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
