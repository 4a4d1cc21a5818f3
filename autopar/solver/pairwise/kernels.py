"""The compiled inner loops on messages and plans; those that move trees are in `tree_moves`.

Nothing here reads a clock or a random source of its own, and no sum is reassociated: the same
arguments give the same answer.
"""

# Inside compiled functions numpy's scalars are Python's.
# pyright: reportReturnType=none, reportArgumentType=none

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, FloatArray, IntArray
from autopar.solver.pairwise.compiling import compiled, compiled_within
from autopar.solver.pairwise.core import Core

# Loops over numbers compile in a third of the time of numpy's functions, and run as fast.


@compiled_within
def most_choices(core: Core) -> int:
    """The most choices of a node."""
    most = 0
    for i in range(len(core.first) - 1):
        most = max(most, core.first[i + 1] - core.first[i])
    return most


@compiled_within
def least_of_nodes(core: Core, own: FloatArray, least: FloatArray) -> None:
    """Sets `least[i]` to the least of `own` over the labels of node `i`."""
    for i in range(len(least)):
        best = own[core.first[i]]
        for label in range(core.first[i] + 1, core.first[i + 1]):
            best = min(best, own[label])
        least[i] = best


@compiled_within
def summed(x: FloatArray) -> float:
    """The sum, added up in order."""
    total = 0.0
    for value in x:
        total += value
    return total


@compiled
def rows_least(core: Core, e: int, is_target: bool, message: FloatArray, least: FloatArray) -> None:
    """Sets `least[c]` to the least cost of edge `e` with choice `c` of this end, less the other
    end's message; this end's message is not subtracted."""
    if core.lean_table[e] >= 0:
        _rows_least_of_lean(core, e, is_target, message, least)
        return
    a, b, costs, pool = core.source[e], core.target[e], core.table[e], core.float_pool
    rows, columns = core.first[a + 1] - core.first[a], core.first[b + 1] - core.first[b]
    if is_target:
        there = core.source_message[e]
        for c in range(columns):
            least[c] = np.inf
        for d in range(rows):
            less, row = message[there + d], costs + d * columns
            for c in range(columns):
                least[c] = min(least[c], pool[row + c] - less)
        return
    there = core.target_message[e]
    for c in range(rows):
        row, best = costs + c * columns, np.inf
        for d in range(columns):
            best = min(best, pool[row + d] - message[there + d])
        least[c] = best


@compiled_within
def _rows_least_of_lean(
    core: Core, e: int, is_target: bool, message: FloatArray, least: FloatArray
) -> None:
    """`rows_least` for an edge with a lean table: of choices with equal rows, the one with the
    highest message costs the least."""
    a, b, costs, pool = core.source[e], core.target[e], core.lean_table[e], core.lean_pool
    rows, columns, place = core.lean_rows[e], core.lean_columns[e], core.lean_place
    there = core.source_message[e] if is_target else core.target_message[e]
    here = core.target_message[e] if is_target else core.source_message[e]
    other, own = (a, b) if is_target else (b, a)
    highest = np.empty(rows if is_target else columns)
    best = np.empty(columns if is_target else rows)
    for r in range(len(highest)):
        highest[r] = -np.inf
    for c in range(len(best)):
        best[c] = np.inf
    for d in range(core.first[other + 1] - core.first[other]):
        at = place[there + d]
        highest[at] = max(highest[at], message[there + d])
    for r in range(rows):
        row = costs + r * columns
        if is_target:
            less = highest[r]
            for c in range(columns):
                best[c] = min(best[c], pool[row + c] - less)
        else:
            least_of_row = np.inf
            for c in range(columns):
                least_of_row = min(least_of_row, pool[row + c] - highest[c])
            best[r] = least_of_row
    for c in range(core.first[own + 1] - core.first[own]):
        least[c] = best[place[here + c]]


@compiled
def sweep(
    core: Core,
    upward: bool,
    order: IntArray,
    is_free: BoolArray,
    theta: FloatArray,
    message: FloatArray,
    choice: IntArray,
    margin: FloatArray,
) -> float:
    """One pass of sequential reweighted message passing (TRW-S) over the free nodes, in `order`
    (ascending) or backwards; all others keep their `choice`. Returns the lower bound that `message`
    then proves on the sum of `theta` and tables that free nodes have a part in.

    `message` moves cost between edges and nodes: edge `e` costs `table - m_source - m_target`, its
    ends that much more. The pass sets the choices of free nodes to the plan it reads off, and
    `margin` to how much more each node's second choice costs.
    """
    pool, widest = core.float_pool, most_choices(core)
    own = np.empty(widest)
    score = np.empty(widest)
    bound = 0.0
    for step in range(len(order)):
        i = order[step] if upward else order[len(order) - 1 - step]
        begin, size = core.first[i], core.first[i + 1] - core.first[i]
        middle = core.near_first[i] + core.near_split[i]
        for c in range(size):
            own[c] = theta[begin + c]
            score[c] = theta[begin + c]
        num_later, num_earlier = 0, 0
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e = core.near_edge[at]
            is_target = at < middle
            base = core.target_message[e] if is_target else core.source_message[e]
            other = core.source[e] if is_target else core.target[e]
            num_other = core.first[other + 1] - core.first[other]
            costs = core.table[e]
            taken = choice[other]
            if not is_free[other]:
                for c in range(size):
                    at_pair = costs + (taken * size + c if is_target else c * num_other + taken)
                    own[c] += pool[at_pair]
                    score[c] += pool[at_pair]
                continue
            if is_target != upward:
                num_later += 1
                for c in range(size):
                    own[c] += message[base + c]
                    score[c] += message[base + c]
                continue
            num_earlier += 1
            heard = message[base : base + size]
            rows_least(core, e, is_target, message, heard)
            for c in range(size):
                score[c] += pool[costs + (taken * size + c if is_target else c * num_other + taken)]
            for c in range(size):
                own[c] += message[base + c]
        best, chosen, second = score[0], 0, np.inf
        least = own[0]
        for c in range(1, size):
            least = min(least, own[c])
            if score[c] < best:
                best, chosen, second = score[c], c, best
            elif score[c] < second:
                second = score[c]
        choice[i] = chosen
        margin[i] = second - best
        share = 1.0 / max(num_later, num_earlier, 1)
        bound += least * (1.0 - share * num_later)
        if num_later == 0:
            continue
        for at in range(core.near_first[i], core.near_first[i + 1]):
            is_target = at < middle
            e = core.near_edge[at]
            if is_target != upward and is_free[core.source[e] + core.target[e] - i]:
                base = core.target_message[e] if is_target else core.source_message[e]
                for c in range(size):
                    message[base + c] -= share * own[c]
    return bound


@compiled
def price_labels(core: Core, order: IntArray, so_far: FloatArray, priced: FloatArray) -> None:
    """Sets `priced` for the labels of the nodes in `order` to their cost of memory; `so_far[t]` is
    the sum of prices before time `t`."""
    for i in order:
        begin, size = core.first[i], core.first[i + 1] - core.first[i]
        for c in range(size):
            priced[begin + c] = 0.0
        for m in range(core.node_item[i], core.node_item[i + 1]):
            price = so_far[core.item_stop[m]] - so_far[core.item_start[m]]
            if price > 0.0:
                for c in range(size):
                    priced[begin + c] += price * core.item_usage[core.item_first[m] + c]


@compiled
def in_use(core: Core, choice: IntArray) -> IntArray:
    """Bytes in use at each time."""
    change = np.zeros(len(core.base) + 1, dtype=np.int64)
    for m in range(len(core.item_node)):
        used = core.item_usage[core.item_first[m] + choice[core.item_node[m]]]
        change[core.item_start[m]] += used
        change[core.item_stop[m]] -= used
    used = 0
    for t in range(len(core.base)):
        used += change[t]
        change[t] = used + core.base[t]
    return change[: len(core.base)]


@compiled
def cost_of(core: Core, choice: IntArray) -> int:
    """The cost of a plan; `FORBIDDEN` if a pair of its choices is not allowed."""
    total = np.int64(0)
    for i in range(len(core.first) - 1):
        total += core.cost[core.first[i] + choice[i]]
    for e in range(len(core.source)):
        columns = core.first[core.target[e] + 1] - core.first[core.target[e]]
        pair = core.pool[core.table[e] + choice[core.source[e]] * columns + choice[core.target[e]]]
        if pair >= FORBIDDEN:
            return np.int64(FORBIDDEN)
        total += pair
    return total


@compiled
def least(core: Core, theta: IntArray, bits: int, message: IntArray) -> tuple[IntArray, IntArray]:
    """The least cost of every node and every edge after `message`, in units of `2**-bits`."""
    own = theta.copy()
    of_edges = np.empty(len(core.source), dtype=np.int64)
    for e in range(len(core.source)):
        a, b = core.first[core.source[e]], core.first[core.target[e]]
        rows = core.first[core.source[e] + 1] - a
        columns = core.first[core.target[e] + 1] - b
        best = np.int64(FORBIDDEN)
        for c in range(rows):
            own[a + c] += message[core.source_message[e] + c]
            for d in range(columns):
                cost = core.pool[core.table[e] + c * columns + d]
                if cost < FORBIDDEN:
                    left = message[core.source_message[e] + c] + message[core.target_message[e] + d]
                    best = min(best, (cost << bits) - left)
        for d in range(columns):
            own[b + d] += message[core.target_message[e] + d]
        of_edges[e] = best
    of_nodes = np.empty(len(core.first) - 1, dtype=np.int64)
    least_of_nodes(core, own, of_nodes)
    return of_nodes, of_edges
