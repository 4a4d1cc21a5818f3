"""The compiled inner loops on messages and plans; those that move trees are in `trees`.

numba compiles each once per machine and keeps the result on disk. Nothing here reads a clock or a
random source of its own, and no sum is reassociated: the same arguments give the same answer.
"""

# numba has no types of its own, and inside compiled functions numpy's scalars are Python's.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none
# pyright: reportUntypedFunctionDecorator=none, reportUnknownVariableType=none
# pyright: reportReturnType=none, reportArgumentType=none

from __future__ import annotations

import numba
import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, FloatArray, IntArray

# Minima may be taken in any order: no figure is a NaN, and the sign of a zero means nothing.
compiled = numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})


@compiled
def rows_least(
    is_target: bool,
    costs: int,
    size: int,
    there: int,
    num_other: int,
    pool: FloatArray,
    message: FloatArray,
    least: FloatArray,
) -> None:
    """Sets `least[c]` to the least of what an edge costs with choice `c` of this end, after the
    other end's message; this one's is not taken off."""
    for c in range(size):
        least[c] = np.inf
    if is_target:
        for d in range(num_other):
            less, row = message[there + d], costs + d * size
            for c in range(size):
                least[c] = min(least[c], pool[row + c] - less)
        return
    for c in range(size):
        row, best = costs + c * num_other, np.inf
        for d in range(num_other):
            best = min(best, pool[row + d] - message[there + d])
        least[c] = best


@compiled
def sweep(
    upward: bool,
    order: IntArray,
    is_free: BoolArray,
    first: IntArray,
    theta: FloatArray,
    source: IntArray,
    target: IntArray,
    table: IntArray,
    pool: FloatArray,
    near_first: IntArray,
    near_split: IntArray,
    near_edge: IntArray,
    source_message: IntArray,
    target_message: IntArray,
    message: FloatArray,
    choice: IntArray,
    margin: FloatArray,
) -> float:
    """One pass of sequential reweighted message passing (TRW-S) over the free nodes, in `order`
    (ascending) or back; all others keep their `choice`. Returns the lower bound that `message`
    then proves on the sum of `theta` and tables, as far as free nodes have a part in it.

    `message` moves cost between edges and nodes: edge `e` costs `table - m_source - m_target`, its
    ends that much more. The choices of free nodes are replaced by the plan read off on the way,
    `margin` says how much dearer each node's second choice was.
    """
    widest = 0
    for i in order:
        widest = max(widest, first[i + 1] - first[i])
    own = np.empty(widest)
    score = np.empty(widest)
    bound = 0.0
    for step in range(len(order)):
        i = order[step] if upward else order[len(order) - 1 - step]
        begin, size = first[i], first[i + 1] - first[i]
        middle = near_first[i] + near_split[i]
        for c in range(size):
            own[c] = theta[begin + c]
            score[c] = theta[begin + c]
        num_later, num_earlier = 0, 0
        for at in range(near_first[i], near_first[i + 1]):
            e = near_edge[at]
            is_target = at < middle
            base = target_message[e] if is_target else source_message[e]
            other = source[e] if is_target else target[e]
            num_other = first[other + 1] - first[other]
            costs = table[e]
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
            there = source_message[e] if is_target else target_message[e]
            rows_least(is_target, costs, size, there, num_other, pool, message, heard)
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
        for at in range(near_first[i], near_first[i + 1]):
            is_target = at < middle
            e = near_edge[at]
            if is_target != upward and is_free[source[e] + target[e] - i]:
                base = target_message[e] if is_target else source_message[e]
                for c in range(size):
                    message[base + c] -= share * own[c]
    return bound


@compiled
def price_labels(
    order: IntArray,
    first: IntArray,
    so_far: FloatArray,
    node_item: IntArray,
    item_start: IntArray,
    item_stop: IntArray,
    item_first: IntArray,
    item_usage: IntArray,
    priced: FloatArray,
) -> None:
    """Sets `priced` for the labels of the nodes in `order` to what they pay for memory; `so_far[t]`
    is the sum of prices before time `t`."""
    for i in order:
        begin, size = first[i], first[i + 1] - first[i]
        for c in range(size):
            priced[begin + c] = 0.0
        for m in range(node_item[i], node_item[i + 1]):
            price = so_far[item_stop[m]] - so_far[item_start[m]]
            if price > 0.0:
                for c in range(size):
                    priced[begin + c] += price * item_usage[item_first[m] + c]


@compiled
def in_use(
    choice: IntArray,
    base: IntArray,
    item_node: IntArray,
    item_start: IntArray,
    item_stop: IntArray,
    item_first: IntArray,
    item_usage: IntArray,
) -> IntArray:
    """Bytes in use at each time."""
    change = np.zeros(len(base) + 1, dtype=np.int64)
    for m in range(len(item_node)):
        used = item_usage[item_first[m] + choice[item_node[m]]]
        change[item_start[m]] += used
        change[item_stop[m]] -= used
    used = 0
    for t in range(len(base)):
        used += change[t]
        change[t] = used + base[t]
    return change[: len(base)]


@compiled
def cost_of(
    choice: IntArray,
    first: IntArray,
    cost: IntArray,
    source: IntArray,
    target: IntArray,
    table: IntArray,
    pool: IntArray,
) -> int:
    """What a plan costs; `FORBIDDEN` where a pair of its choices is not allowed."""
    total = np.int64(0)
    for i in range(len(first) - 1):
        total += cost[first[i] + choice[i]]
    for e in range(len(source)):
        columns = first[target[e] + 1] - first[target[e]]
        pair = pool[table[e] + choice[source[e]] * columns + choice[target[e]]]
        if pair >= FORBIDDEN:
            return np.int64(FORBIDDEN)
        total += pair
    return total


@compiled
def least(
    first: IntArray,
    theta: IntArray,
    source: IntArray,
    target: IntArray,
    table: IntArray,
    pool: IntArray,
    bits: int,
    source_message: IntArray,
    target_message: IntArray,
    message: IntArray,
) -> tuple[IntArray, IntArray]:
    """The least of every node and of every edge after `message`, in units of `2**-bits`."""
    num_nodes = len(first) - 1
    own = theta.copy()
    of_edges = np.empty(len(source), dtype=np.int64)
    for e in range(len(source)):
        a, b = first[source[e]], first[target[e]]
        rows = first[source[e] + 1] - a
        columns = first[target[e] + 1] - b
        best = np.int64(FORBIDDEN)
        for c in range(rows):
            own[a + c] += message[source_message[e] + c]
            for d in range(columns):
                cost = pool[table[e] + c * columns + d]
                if cost < FORBIDDEN:
                    left = message[source_message[e] + c] + message[target_message[e] + d]
                    best = min(best, (cost << bits) - left)
        for d in range(columns):
            own[b + d] += message[target_message[e] + d]
        of_edges[e] = best
    of_nodes = np.empty(num_nodes, dtype=np.int64)
    for i in range(num_nodes):
        best = own[first[i]]
        for c in range(first[i] + 1, first[i + 1]):
            best = min(best, own[c])
        of_nodes[i] = best
    return of_nodes, of_edges
