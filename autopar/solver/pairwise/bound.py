"""Memory over time under prices, and the lower bound that prices and messages prove.

For any prices `p >= 0` of a byte at each time, a plan within the limit costs at least

    min over plans of (cost + sum_t p_t use_t) - sum_t p_t limit,

and any split of costs between nodes and edges (`message`) bounds that minimum from below by the sum
of the least costs of all nodes and edges. Prices and messages are in floating point; `certify`
rounds them to integers and adds the bound up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FloatArray, IntArray
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.core import Core

# Memory over time: the bytes in use under a plan, and the costs that prices add to labels.


class MemoryPrices:
    """Use and prices of memory for one core; times are those of maximal live sets."""

    def __init__(self, core: Core) -> None:
        self.core = core
        counts = np.diff(core.first)[core.item_node]
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        self._item = np.repeat(np.arange(len(counts)), counts)
        self._label = within + np.repeat(core.first[core.item_node], counts)

    def in_use(self, choice: IntArray) -> IntArray:
        """Bytes in use at each time."""
        return kernels.in_use(self.core, choice)

    def excess(self, choice: IntArray) -> FloatArray:
        """The excess over the limit at each time, as a part of the limit; empty without one."""
        return (self.in_use(choice) - self.core.limit) / max(1, self.core.limit)

    def prices(
        self, multipliers: FloatArray, order: IntArray | None = None, out: FloatArray | None = None
    ) -> FloatArray:
        """Per label, its cost of memory at a price per byte and time. With `order`, only the labels
        of these nodes are set (in `out`)."""
        core = self.core
        so_far = np.concatenate([[0.0], np.cumsum(multipliers)])
        priced = np.zeros(len(core.cost)) if out is None else out
        if order is None:
            order = np.arange(core.num_nodes)
        kernels.price_labels(core, order, so_far, priced)
        return priced

    def floors(self, multipliers: IntArray, shift: int, most: int) -> IntArray:
        """`prices` of integer multipliers in exact arithmetic, divided by `2**shift` and rounded
        down; of each item at most `most`."""
        core = self.core
        so_far = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(multipliers)])
        of_item = (so_far[core.item_stop] - so_far[core.item_start])[self._item]
        exact = (core.item_usage.astype(object) * of_item.astype(object)) >> shift
        capped = np.minimum(exact, most).astype(np.int64)
        total = np.zeros(len(core.cost), dtype=np.int64)
        np.add.at(total, self._label, capped)
        return total

    def peak_tree(self, choice: IntArray) -> tuple[IntArray, int]:
        """The segment tree of bytes in use, as in `tree_moves.add_usage`, and its size."""
        size = 1 << max(0, self.core.num_times - 1).bit_length()
        tree = np.zeros(4 * size, dtype=np.int64)
        level = np.zeros(size, dtype=np.int64)
        level[: self.core.num_times] = self.in_use(choice)
        tree[size : 2 * size] = level
        at = size
        while True:
            tree[2 * size + at : 2 * size + 2 * at] = level
            if at == 1:
                return tree, size
            level = np.maximum(level[0::2], level[1::2])
            at //= 2


_COST_BITS = 50
_MULTIPLIER_BITS = 61
_MOST_PAID = 2.0**50


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """Prices and messages for the search of plans, and the bound they prove, without the cost of
    settled nodes. `unit` is the cost that steps of the prices are relative to."""

    multipliers: FloatArray
    message: FloatArray
    bound: float
    unit: float


def certify(core: Core, memory: MemoryPrices, guide: Guide) -> int:
    """The lower bound that `guide` proves in exact arithmetic, with the cost of settled nodes."""
    # Any prices of at least 0 prove a bound; those too large for integers are scaled down.
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
