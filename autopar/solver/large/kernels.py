"""The compiled inner loops: message passing for the bound, moves of whole trees for plans.

numba compiles each once per machine and keeps the result on disk. Nothing here reads a clock or a
random source of its own, and no sum is reassociated: the same arguments give the same answer.
"""

# numba has no types of its own.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none
# pyright: reportUntypedFunctionDecorator=none

from __future__ import annotations

import numba
import numpy as np

from autopar.problem import FORBIDDEN, IntArray
from autopar.solver.large.core import FloatArray
from autopar.solver.reductions.tables import BoolArray

HUB = 64
"""Nodes with more edges than this do not bring their neighbours into a tree."""

# Minima may be taken in any order: no figure is a NaN, and the sign of a zero means nothing.
_compiled = numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})


@_compiled
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
            if is_target:
                there = source_message[e]
                for c in range(size):
                    message[base + c] = np.inf
                for d in range(num_other):
                    less = message[there + d]
                    row = costs + d * size
                    for c in range(size):
                        message[base + c] = min(message[base + c], pool[row + c] - less)
                row = costs + taken * size
                for c in range(size):
                    score[c] += pool[row + c]
            else:
                there = target_message[e]
                for c in range(size):
                    row = costs + c * num_other
                    best = np.inf
                    for d in range(num_other):
                        best = min(best, pool[row + d] - message[there + d])
                    message[base + c] = best
                    score[c] += pool[row + taken]
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


@_compiled
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


@_compiled
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


@_compiled
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


@_compiled
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


@_compiled
def add_usage(tree: IntArray, size: int, start: int, stop: int, amount: int) -> None:
    """Adds `amount` at the times `start <= t < stop` of a segment tree of maxima.

    `tree[v]` is what was added to all of the span of `v`, `tree[2 size + v]` the largest sum in it.
    """
    left, right = start + size, stop + size
    while left < right:
        if left & 1:
            tree[left] += amount
            tree[2 * size + left] += amount
            left += 1
        if right & 1:
            right -= 1
            tree[right] += amount
            tree[2 * size + right] += amount
        left >>= 1
        right >>= 1
    for end in (start + size, stop - 1 + size):
        v = end >> 1
        while v:
            higher = max(tree[2 * size + 2 * v], tree[2 * size + 2 * v + 1])
            tree[2 * size + v] = tree[v] + higher
            v >>= 1


@_compiled
def set_choice(
    node: int,
    chosen: int,
    choice: IntArray,
    node_item: IntArray,
    item_start: IntArray,
    item_stop: IntArray,
    item_first: IntArray,
    item_usage: IntArray,
    tree: IntArray,
    size: int,
) -> None:
    """`node` takes `chosen`; the memory in use follows."""
    old = choice[node]
    for m in range(node_item[node], node_item[node + 1]):
        more = item_usage[item_first[m] + chosen] - item_usage[item_first[m] + old]
        if more != 0:
            add_usage(tree, size, item_start[m], item_stop[m], more)
    choice[node] = chosen


@_compiled
def move_trees(
    num_moves: int,
    most_nodes: int,
    seed: int,
    limit: int,
    first: IntArray,
    theta: FloatArray,
    price: FloatArray,
    source: IntArray,
    target: IntArray,
    table: IntArray,
    pool: FloatArray,
    near_first: IntArray,
    near_split: IntArray,
    near_edge: IntArray,
    node_item: IntArray,
    item_start: IntArray,
    item_stop: IntArray,
    item_first: IntArray,
    item_usage: IntArray,
    tree: IntArray,
    size: int,
    choice: IntArray,
    factors: FloatArray,
) -> tuple[int, float]:
    """Moves random trees of up to `most_nodes` nodes to their best choices, all else as it is.

    A move minimises cost plus one of `factors` times the price of memory (both per label); it is
    exact on the tree. It is taken back where more than `limit` is then in use, or where cost plus
    price is higher than before; as long as more than `limit` is in use, where the peak is. Returns
    the next seed and the change of cost.
    """
    num_nodes = len(first) - 1
    state = np.uint64(seed)
    position = np.full(num_nodes, -1, dtype=np.int64)
    touched = np.zeros(num_nodes, dtype=np.int64)
    members = np.empty(most_nodes, dtype=np.int64)
    parent = np.empty(most_nodes, dtype=np.int64)
    link = np.empty(most_nodes, dtype=np.int64)
    old = np.empty(most_nodes, dtype=np.int64)
    offset = np.empty(most_nodes + 1, dtype=np.int64)
    queue = np.empty(num_nodes, dtype=np.int64)
    widest = 0
    for i in range(num_nodes):
        widest = max(widest, first[i + 1] - first[i])
    sums = np.empty(most_nodes * widest)
    best_child = np.empty(most_nodes * widest, dtype=np.int64)
    total = 0.0
    root_of_peak = 2 * size + 1
    for _ in range(num_moves):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        draw = state >> np.uint64(33)
        start = np.int64(draw % np.uint64(num_nodes))
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        draw = state >> np.uint64(33)
        factor = factors[np.int64(draw % np.uint64(len(factors)))]
        # Grow the tree: a node joins when it has one neighbour in it.
        count = 0
        queue_len = 1
        queue[0] = start
        touched[start] = 1
        while queue_len > 0 and count < most_nodes:
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            draw = state >> np.uint64(33)
            pick = np.int64(draw % np.uint64(queue_len))
            i = queue[pick]
            queue_len -= 1
            queue[pick] = queue[queue_len]
            inside, via = 0, -1
            for at in range(near_first[i], near_first[i + 1]):
                e = near_edge[at]
                other = source[e] + target[e] - i
                if position[other] >= 0:
                    inside += 1
                    via = e
            if inside > 1:
                touched[i] = 2
                continue
            touched[i] = 2
            position[i] = count
            members[count] = i
            link[count] = via
            parent[count] = position[source[via] + target[via] - i] if via >= 0 else -1
            count += 1
            if near_first[i + 1] - near_first[i] > HUB and count > 1:
                continue
            for at in range(near_first[i], near_first[i + 1]):
                e = near_edge[at]
                other = source[e] + target[e] - i
                if touched[other] == 0 and queue_len < num_nodes:
                    touched[other] = 1
                    queue[queue_len] = other
                    queue_len += 1
        # Costs of each choice with all outside as it is.
        offset[0] = 0
        for k in range(count):
            i = members[k]
            begin, width = first[i], first[i + 1] - first[i]
            offset[k + 1] = offset[k] + width
            to = offset[k]
            for c in range(width):
                sums[to + c] = theta[begin + c] + factor * price[begin + c]
            middle = near_first[i] + near_split[i]
            for at in range(near_first[i], near_first[i + 1]):
                e = near_edge[at]
                other = source[e] + target[e] - i
                if position[other] >= 0:
                    continue
                if at < middle:
                    row = table[e] + choice[other] * width
                    for c in range(width):
                        sums[to + c] += pool[row + c]
                else:
                    across = first[other + 1] - first[other]
                    row = table[e] + choice[other]
                    for c in range(width):
                        sums[to + c] += pool[row + c * across]
        # From the leaves to the root, and back.
        for k in range(count - 1, 0, -1):
            i = members[k]
            e = link[k]
            p = parent[k]
            width = offset[k + 1] - offset[k]
            to = offset[p]
            above = offset[p + 1] - to
            own = offset[k]
            costs = table[e]
            if target[e] == i:
                for d in range(above):
                    row = costs + d * width
                    best, at_best = pool[row] + sums[own], 0
                    for c in range(1, width):
                        value = pool[row + c] + sums[own + c]
                        if value < best:
                            best, at_best = value, c
                    sums[to + d] += best
                    best_child[k * widest + d] = at_best
            else:
                for d in range(above):
                    row = costs + d
                    best, at_best = pool[row] + sums[own], 0
                    for c in range(1, width):
                        value = pool[row + c * above] + sums[own + c]
                        if value < best:
                            best, at_best = value, c
                    sums[to + d] += best
                    best_child[k * widest + d] = at_best
        # The sums of inner nodes now hold their subtrees; compare at the root only.
        root = 0
        here = choice[members[0]]
        for c in range(offset[1]):
            if sums[c] < sums[root]:
                root = c
        if not sums[root] < sums[here]:
            root = here
        before = tree[root_of_peak]
        loss = 0.0
        cost_change = 0.0
        changed = 0
        for k in range(count):
            i = members[k]
            old[k] = choice[i]
        for k in range(count):
            i = members[k]
            new = root
            if k > 0:
                new = best_child[k * widest + choice[members[parent[k]]]]
            if new != old[k]:
                changed += 1
                set_choice(
                    i, new, choice, node_item, item_start, item_stop, item_first, item_usage,
                    tree, size,
                )  # fmt: skip
        if changed:
            for k in range(count):
                i = members[k]
                new = choice[i]
                begin = first[i]
                cost_change += theta[begin + new] - theta[begin + old[k]]
                loss += price[begin + new] - price[begin + old[k]]
                for at in range(near_first[i], near_first[i + 1]):
                    e = near_edge[at]
                    other = source[e] + target[e] - i
                    inner = position[other]
                    # Between two members, an edge is counted at the later one.
                    if inner > k or (inner < 0 and new == old[k]):
                        continue
                    a = source[e]
                    width = first[target[e] + 1] - first[target[e]]
                    was_other = choice[other] if inner < 0 else old[inner]
                    if a == i:
                        after = pool[table[e] + new * width + choice[other]]
                        past = pool[table[e] + old[k] * width + was_other]
                    else:
                        after = pool[table[e] + choice[other] * width + new]
                        past = pool[table[e] + was_other * width + old[k]]
                    cost_change += after - past
            peak = tree[root_of_peak]
            if before > limit:
                keep = peak <= before
            else:
                keep = peak <= limit and cost_change + loss <= 0.0
            if keep:
                total += cost_change
            else:
                for k in range(count):
                    i = members[k]
                    if choice[i] != old[k]:
                        set_choice(
                            i, old[k], choice, node_item, item_start, item_stop, item_first,
                            item_usage, tree, size,
                        )  # fmt: skip
        for k in range(count):
            i = members[k]
            position[i] = -1
            touched[i] = 0
            for at in range(near_first[i], near_first[i + 1]):
                e = near_edge[at]
                touched[source[e]] = 0
                touched[target[e]] = 0
    return np.int64(state >> np.uint64(2)), total
