"""Memory over time: what a plan has in use, and what a price per time adds to labels."""

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FloatArray, IntArray
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.core import Core


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
        """How far each time is above the limit, as a part of it; empty without a limit."""
        return (self.in_use(choice) - self.core.limit) / max(1, self.core.limit)

    def prices(
        self, multipliers: FloatArray, order: IntArray | None = None, out: FloatArray | None = None
    ) -> FloatArray:
        """Per label, what it pays for memory at a price per byte and time; with `order`, only the
        labels of these nodes are set (in `out`)."""
        core = self.core
        so_far = np.concatenate([[0.0], np.cumsum(multipliers)])
        priced = np.zeros(len(core.cost)) if out is None else out
        if order is None:
            order = np.arange(core.num_nodes)
        kernels.price_labels(core, order, so_far, priced)
        return priced

    def floors(self, multipliers: IntArray, shift: int, most: int) -> IntArray:
        """`prices` of integer multipliers in exact arithmetic, divided by `2**shift` and rounded
        down, each item's at most `most`."""
        core = self.core
        so_far = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(multipliers)])
        of_item = (so_far[core.item_stop] - so_far[core.item_start])[self._item]
        exact = (core.item_usage.astype(object) * of_item.astype(object)) >> shift
        capped = np.minimum(exact, most).astype(np.int64)
        total = np.zeros(len(core.cost), dtype=np.int64)
        np.add.at(total, self._label, capped)
        return total

    def peak_tree(self, choice: IntArray) -> tuple[IntArray, int]:
        """The segment tree of what is in use, as `tree_moves.add_usage` keeps it, and its size."""
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
