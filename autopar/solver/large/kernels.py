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

from autopar.problem import IntArray
from autopar.solver.large.core import FloatArray

# Minima may be taken in any order: no figure is a NaN, and the sign of a zero means nothing.
_compiled = numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})


@_compiled
def sweep(
    upward: bool,
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
) -> float:
    """One pass of sequential reweighted message passing (TRW-S), from the first node to the last
    or back; returns the lower bound that `message` then proves on the sum of `theta` and tables.

    `message` moves cost between edges and nodes: edge `e` costs `table - m_source - m_target`, its
    ends that much more. `choice` is replaced by the plan read off on the way.
    """
    num_nodes = len(first) - 1
    widest = 0
    for i in range(num_nodes):
        widest = max(widest, first[i + 1] - first[i])
    own = np.empty(widest)
    score = np.empty(widest)
    bound = 0.0
    for step in range(num_nodes):
        i = step if upward else num_nodes - 1 - step
        begin, size = first[i], first[i + 1] - first[i]
        middle = near_first[i] + near_split[i]
        for c in range(size):
            own[c] = theta[begin + c]
            score[c] = theta[begin + c]
        num_later = 0
        for at in range(near_first[i], near_first[i + 1]):
            e = near_edge[at]
            is_target = at < middle
            base = target_message[e] if is_target else source_message[e]
            other = source[e] if is_target else target[e]
            num_other = first[other + 1] - first[other]
            if is_target != upward:
                num_later += 1
                for c in range(size):
                    own[c] += message[base + c]
                    score[c] += message[base + c]
                continue
            costs = table[e]
            if is_target:
                there = source_message[e]
                for c in range(size):
                    message[base + c] = np.inf
                for d in range(num_other):
                    less = message[there + d]
                    row = costs + d * size
                    for c in range(size):
                        message[base + c] = min(message[base + c], pool[row + c] - less)
                row = costs + choice[other] * size
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
                    score[c] += pool[row + choice[other]]
            for c in range(size):
                own[c] += message[base + c]
        best, chosen = score[0], 0
        least = own[0]
        for c in range(1, size):
            least = min(least, own[c])
            if score[c] < best:
                best, chosen = score[c], c
        choice[i] = chosen
        num_earlier = near_first[i + 1] - near_first[i] - num_later
        share = 1.0 / max(num_later, num_earlier, 1)
        bound += least * (1.0 - share * num_later)
        if num_later == 0:
            continue
        for at in range(near_first[i], near_first[i + 1]):
            is_target = at < middle
            if is_target != upward:
                e = near_edge[at]
                base = target_message[e] if is_target else source_message[e]
                for c in range(size):
                    message[base + c] -= share * own[c]
    return bound


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
    walled: bool,
    most_loss: float,
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
    exact on the tree. With `walled`, it is taken back where memory then exceeds `limit` (and rose),
    or where cost plus price rises by more than `most_loss`, scaled at random. Returns the next seed
    and the change of cost.
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
            if near_first[i + 1] - near_first[i] > 64 and count > 1 and most_nodes < 64:
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
            # Costs of edges change with either end; count each edge once, at its later member.
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
            keep = True
            if walled:
                state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
                draw = state >> np.uint64(33)
                fraction = np.float64(draw) / 2147483648.0
                allowed = most_loss * -np.log(fraction + 1e-12)
                peak = tree[root_of_peak]
                keep = not (peak > limit and peak > before)
                if before <= limit:
                    keep = keep and cost_change + loss <= allowed
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
