"""Memory over time: what a plan of the core has in use, and what a price per time adds to labels."""

from __future__ import annotations

import numpy as np

from autopar.problem import IntArray
from autopar.solver.large.core import Core, FloatArray


class Memory:
    """Use and prices of memory for one core; times are those of maximal live sets."""

    def __init__(self, core: Core) -> None:
        self.core = core
        counts = np.diff(core.first)[core.item_node]
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        self._item = np.repeat(np.arange(len(counts)), counts)
        self._label = within + np.repeat(core.first[core.item_node], counts)
        self._usage = core.item_usage.astype(np.float64)

    def in_use(self, choice: IntArray) -> IntArray:
        """Bytes in use at each time."""
        core = self.core
        taken = core.item_usage[core.item_first + choice[core.item_node]]
        change = np.zeros(core.num_times + 1, dtype=np.int64)
        np.add.at(change, core.item_start, taken)
        np.subtract.at(change, core.item_stop, taken)
        return core.base + np.cumsum(change)[:-1]

    def excess(self, choice: IntArray) -> FloatArray:
        """How far each time is above the limit, as a part of it; empty without a limit."""
        return (self.in_use(choice) - self.core.limit) / max(1, self.core.limit)

    def prices(self, multipliers: FloatArray) -> FloatArray:
        """Per label, what it pays for memory at a price per byte and time."""
        core = self.core
        so_far = np.concatenate([[0.0], np.cumsum(multipliers)])
        of_item = so_far[core.item_stop] - so_far[core.item_start]
        weights = self._usage * of_item[self._item]
        return np.bincount(self._label, weights=weights, minlength=len(core.cost))

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
        """The segment tree of what is in use, as `kernels.add_usage` keeps it, and its size."""
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
