"""The contracted problem as flat arrays for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.problem import FORBIDDEN, FloatArray, IntArray, Problem
from autopar.solver.memory import maximal_times
from autopar.solver.pairwise.contract import Contracted, takes_memory

# Lean tables, without repeated rows and columns.
#
# The table of a tensor's costs between two ops has a row per choice of the op that makes it.
# Choices that make it in one state have equal rows. On three axes half of all entries repeat in
# another row or column, and message passing reads all of them in every sweep.

_LARGE, _WORTH = 500, 0.7
"""The least entries of a table that may get a lean one, and the largest part of them that this may
have to be faster: labels then need an index."""

_ODD = np.int64(-7046029254386353131)
"""An odd number without a pattern in its bits: sums of products with it tell rows apart."""


def _lean_tables(tables: Sequence[IntArray], at: IntArray, too_much: float) -> dict[str, Any]:
    """The fields of a `Core` that begin with `lean_`; edge `e` has `tables[at[e]]`. `FORBIDDEN`
    entries cost `too_much`."""
    lean = [_lean(table) for table in tables]
    none: IntArray = np.empty(0, dtype=np.int64)
    starts = np.cumsum([0, *(table.size for table, _ in lean)]).tolist()
    table = [start if each.size else -1 for start, (each, _) in zip(starts, lean, strict=False)]
    rows, columns = np.array([each.shape for each, _ in lean], np.int64).reshape(-1, 2).T
    places = [lean[int(k)][1] for k in at]
    pool = np.concatenate([none, *(table.ravel() for table, _ in lean)])
    return {
        "lean_table": np.array(table, dtype=np.int64)[at],
        "lean_rows": rows[at],
        "lean_columns": columns[at],
        "lean_place": np.concatenate([none, *places]),
        "lean_pool": np.where(pool >= FORBIDDEN, too_much, pool.astype(np.float64)),
    }


def _lean(table: IntArray) -> tuple[IntArray, IntArray]:
    """The table of distinct rows and columns, and the place of each label among them; an empty
    table if that would save too little."""
    if table.size >= _LARGE:
        rows, row_places = _distinct_rows(table)
        columns, column_places = _distinct_rows(table.T)
        if len(rows) * len(columns) <= _WORTH * table.size:
            return table[np.ix_(rows, columns)], np.concatenate([row_places, column_places])
    return np.empty((0, 0), dtype=np.int64), np.zeros(sum(table.shape), dtype=np.int64)


def _distinct_rows(table: IntArray) -> tuple[IntArray, IntArray]:
    """The index of each distinct row, and per row its place among these."""
    weights: IntArray = np.arange(1, 2 * table.shape[1], 2, dtype=np.int64) * _ODD
    sums: IntArray = table @ np.bitwise_xor(weights, weights >> 29)
    _, first, places = np.unique(sums, return_index=True, return_inverse=True)
    if not np.array_equal(table[first[places]], table):
        # Two different rows have the same sum by chance.
        every: IntArray = np.arange(len(table), dtype=np.int64)
        return every, every
    return first.astype(np.int64), places.astype(np.int64)


class Core(NamedTuple):
    """Choice `c` of node `i` is label `first[i] + c`.

    Edge `e` lies between `source[e] < target[e]`. Its costs start at `table[e]` in `pool`, row by
    row (rows are the source's choices). `float_pool` has them in floating point, with `too_much`
    where a pair is not allowed. `near_edge[near_first[i]:near_first[i + 1]]` are the edges of node
    `i`, those to lower nodes first (`near_split[i]` of them).

    Many rows or columns of an edge's table may be equal, as choices make or read a tensor in one
    state. Then `lean_pool` has the distinct ones from `lean_table[e]` on (else that is -1). These
    are `lean_rows[e]` times `lean_columns[e]` entries. `lean_place`, laid out like messages, has
    the place of a label's row or column among them.

    Item `m` is memory of node `item_node[m]` at the times `item_start[m] <= t < item_stop[m]`:
    `item_usage[item_first[m] + c]` bytes above `base`, which every plan uses. Items are ordered by
    node (`node_item[i]:node_item[i + 1]`). Times are those of maximal live sets.
    """

    first: IntArray
    cost: IntArray
    source: IntArray
    target: IntArray
    table: IntArray
    pool: IntArray
    float_pool: FloatArray
    near_first: IntArray
    near_split: IntArray
    near_edge: IntArray
    source_message: IntArray
    target_message: IntArray
    lean_table: IntArray
    lean_rows: IntArray
    lean_columns: IntArray
    lean_place: IntArray
    lean_pool: FloatArray
    item_node: IntArray
    node_item: IntArray
    item_start: IntArray
    item_stop: IntArray
    item_first: IntArray
    item_usage: IntArray
    base: IntArray
    limit: int
    fixed_cost: int
    too_much: float

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.first) - 1

    @property
    def num_times(self) -> int:
        """Number of maximal live sets; 0 without a limit on memory."""
        return len(self.base)


def lay_out(problem: Problem, contracted: Contracted) -> Core:
    """`contracted` in arrays, its nodes in order of the problem's."""
    nodes = contracted.nodes
    place = {node: at for at, node in enumerate(nodes)}
    counts = np.array([len(contracted.costs[i]) for i in nodes], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    pairs = [(place[i], place[j], n) for i in nodes for j, n in contracted.near[i].items()]
    edges = sorted((a, b, n) for a, b, n in pairs if a < b)
    source, target, numbers = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    used, at = np.unique(numbers, return_inverse=True)
    tables = [contracted.tables[int(n)].ravel() for n in used]
    starts = np.concatenate([[0], np.cumsum([len(t) for t in tables])]).astype(np.int64)
    pool = np.concatenate([np.empty(0, dtype=np.int64), *tables])
    cost = np.concatenate([np.empty(0, dtype=np.int64), *(contracted.costs[i] for i in nodes)])
    largest = [float(c.max()) for c in (contracted.costs[i] for i in nodes)]
    most = [float(np.where(t < FORBIDDEN, t, 0).max(initial=0)) for t in tables]
    too_much = 1.0 + sum(largest) + float(np.array(most)[at].sum() if len(most) else 0.0)
    near_first, near_split, near_edge = _near(len(nodes), source, target)
    sizes = np.stack([counts[source], counts[target]], axis=1).ravel()
    places = np.concatenate([[0], np.cumsum(sizes)])[:-1].reshape(-1, 2).astype(np.int64)
    return Core(
        first=first,
        cost=cost,
        source=np.ascontiguousarray(source),
        target=np.ascontiguousarray(target),
        table=starts[at].astype(np.int64),
        pool=pool,
        float_pool=np.where(pool >= FORBIDDEN, too_much, pool.astype(np.float64)),
        near_first=near_first,
        near_split=near_split,
        near_edge=near_edge,
        source_message=np.ascontiguousarray(places[:, 0]),
        target_message=np.ascontiguousarray(places[:, 1]),
        **_lean_tables([contracted.tables[int(n)] for n in used], at, too_much),
        **_items(problem, contracted, place),
        limit=problem.usage_limit if problem.usage_limit is not None else 0,
        fixed_cost=contracted.fixed_cost,
        too_much=too_much,
    )


def _near(count: int, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    ends = np.concatenate([target, source])
    edges = np.concatenate([np.arange(len(source)), np.arange(len(source))])
    order = np.lexsort((edges, np.repeat([0, 1], len(source)), ends))
    first = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=count))])
    split = np.bincount(target, minlength=count)
    return first.astype(np.int64), split.astype(np.int64), edges[order].astype(np.int64)


def _items(problem: Problem, contracted: Contracted, place: dict[int, int]) -> dict[str, Any]:
    """The fields of a `Core` for memory items."""
    times = maximal_times(problem)
    led = contracted.led()
    base = np.zeros(len(times) + 1, dtype=np.int64)
    merged: dict[tuple[int, int, int], IntArray] = {}
    for node, usages in enumerate(problem.usages):
        if not takes_memory(problem, node):
            continue
        leader, choices = led[node]
        for usage in usages:
            start, stop = np.searchsorted(times, (usage.start, usage.stop)).tolist()
            if start >= stop:
                continue
            taken = np.atleast_1d(usage.amounts[choices])
            least = int(taken.min())
            base[start] += least
            base[stop] -= least
            taken = taken - least
            if taken.any():
                key = (place[leader], start, stop)
                merged[key] = merged[key] + taken if key in merged else taken
    keys = sorted(merged)
    node, start, stop = np.array(keys, dtype=np.int64).reshape(-1, 3).T
    usages = [merged[key] for key in keys]
    first = np.concatenate([[0], np.cumsum([len(u) for u in usages])])[:-1]
    return {
        "item_node": np.ascontiguousarray(node),
        "node_item": np.searchsorted(node, np.arange(len(place) + 1)).astype(np.int64),
        "item_start": np.ascontiguousarray(start),
        "item_stop": np.ascontiguousarray(stop),
        "item_first": first.astype(np.int64),
        "item_usage": np.concatenate([np.empty(0, dtype=np.int64), *usages]),
        "base": np.cumsum(base)[:-1] + _missing(problem, times),
    }


def _missing(problem: Problem, times: IntArray) -> IntArray:
    """By how much the limits at `times` are below the usual one: those bytes count as in use."""
    usual = problem.usage_limit or 0
    return np.array([usual - problem.limit_at(time) for time in times.tolist()], np.int64)
