"""Compiled moves of whole trees: exact dynamic programming on a random tree of nodes, all else
fixed, with a hard limit on memory. `kernels` has the rules for compiled functions."""

# Inside compiled functions numpy's scalars are Python's.
# pyright: reportReturnType=none, reportArgumentType=none

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FloatArray, IntArray
from autopar.solver.pairwise.compiling import compiled, compiled_within
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.kernels import most_choices

HUB = 64
"""Nodes with more edges than this do not bring their neighbours into a tree."""


@compiled_within
def next_random(state: IntArray, below: int) -> int:
    """A number in [0, below) from the generator in `state[0]` (Knuth's linear congruence)."""
    x = np.uint64(state[0]) * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    state[0] = np.int64(x)
    return np.int64((x >> np.uint64(33)) % np.uint64(below))


@compiled_within
def add_usage(tree: IntArray, size: int, start: int, stop: int, amount: int) -> None:
    """Adds `amount` at the times `start <= t < stop` of a segment tree of maxima.

    `tree[v]` is the sum added to the whole span of `v`, `tree[2 size + v]` the largest sum in it.
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


@compiled_within
def set_choice(
    core: Core, node: int, chosen: int, choice: IntArray, tree: IntArray, size: int
) -> None:
    """Sets the choice of `node` to `chosen`, and updates the memory in use."""
    old = choice[node]
    for m in range(core.node_item[node], core.node_item[node + 1]):
        at = core.item_first[m]
        more = core.item_usage[at + chosen] - core.item_usage[at + old]
        if more != 0:
            add_usage(tree, size, core.item_start[m], core.item_stop[m], more)
    choice[node] = chosen


@compiled_within
def grow(
    core: Core,
    start: int,
    state: IntArray,
    position: IntArray,
    touched: IntArray,
    queue: IntArray,
    members: IntArray,
    parent: IntArray,
    link: IntArray,
) -> int:
    """A random tree around `start`: a node joins when it has one neighbour in it.

    `members` come after their parents, `link` is the edge to those; returns how many there are.
    """
    count, waiting = 0, 1
    queue[0] = start
    touched[start] = 1
    while waiting > 0 and count < len(members):
        pick = next_random(state, waiting)
        i = queue[pick]
        waiting -= 1
        queue[pick] = queue[waiting]
        inside, via = 0, -1
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e = core.near_edge[at]
            if position[core.source[e] + core.target[e] - i] >= 0:
                inside += 1
                via = e
        if inside > 1:
            continue
        position[i] = count
        members[count] = i
        link[count] = via
        parent[count] = position[core.source[via] + core.target[via] - i] if via >= 0 else -1
        count += 1
        if core.near_first[i + 1] - core.near_first[i] > HUB and count > 1:
            continue
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e = core.near_edge[at]
            other = core.source[e] + core.target[e] - i
            if touched[other] == 0:
                touched[other] = 1
                queue[waiting] = other
                waiting += 1
    return count


@compiled_within
def add_outside(
    core: Core, i: int, sums: FloatArray, to: int, position: IntArray, choice: IntArray
) -> None:
    """Adds to `sums[to:]` the costs of each choice of `i` with neighbours outside the tree."""
    width = core.first[i + 1] - core.first[i]
    for at in range(core.near_first[i], core.near_first[i + 1]):
        e = core.near_edge[at]
        other = core.source[e] + core.target[e] - i
        if position[other] >= 0:
            continue
        if core.target[e] == i:
            row = core.table[e] + choice[other] * width
            for c in range(width):
                sums[to + c] += core.float_pool[row + c]
        else:
            across = core.first[other + 1] - core.first[other]
            row = core.table[e] + choice[other]
            for c in range(width):
                sums[to + c] += core.float_pool[row + c * across]


@compiled_within
def pass_up(
    sums: FloatArray,
    own: int,
    width: int,
    to: int,
    above: int,
    costs: int,
    is_target: bool,
    pool: FloatArray,
    best_child: IntArray,
    at: int,
) -> None:
    """Adds the least cost of the subtree at `sums[own:]` to the parent's `sums[to:]`."""
    step = 1 if is_target else above
    for d in range(above):
        row = costs + (d * width if is_target else d)
        best, at_best = pool[row] + sums[own], 0
        for c in range(1, width):
            value = pool[row + c * step] + sums[own + c]
            if value < best:
                best, at_best = value, c
        sums[to + d] += best
        best_child[at + d] = at_best


@compiled_within
def change_of_cost(
    core: Core,
    k: int,
    i: int,
    old: IntArray,
    theta: FloatArray,
    position: IntArray,
    choice: IntArray,
) -> float:
    """The change of cost of member `k`, node `i`, with its edges. An edge between two members
    counts at the later one."""
    new = choice[i]
    change = theta[core.first[i] + new] - theta[core.first[i] + old[k]]
    for at in range(core.near_first[i], core.near_first[i + 1]):
        e = core.near_edge[at]
        other = core.source[e] + core.target[e] - i
        inner = position[other]
        if inner > k or (inner < 0 and new == old[k]):
            continue
        width = core.first[core.target[e] + 1] - core.first[core.target[e]]
        was_other = choice[other] if inner < 0 else old[inner]
        if core.source[e] == i:
            change += core.float_pool[core.table[e] + new * width + choice[other]]
            change -= core.float_pool[core.table[e] + old[k] * width + was_other]
        else:
            change += core.float_pool[core.table[e] + choice[other] * width + new]
            change -= core.float_pool[core.table[e] + was_other * width + old[k]]
    return change


@compiled
def move_trees(
    core: Core,
    starts: IntArray,
    num_moves: int,
    most_nodes: int,
    state: IntArray,
    limit: int,
    theta: FloatArray,
    price: FloatArray,
    tree: IntArray,
    size: int,
    choice: IntArray,
    factors: FloatArray,
) -> None:
    """Moves random trees of up to `most_nodes` nodes around any of `starts` to their best choices,
    all else as it is.

    A move minimizes cost plus one of `factors` times the price of memory (both per label), exactly
    on the tree. It is undone if memory then exceeds `limit`, or if cost plus price is higher. While
    memory exceeds `limit`, it is undone if the peak is higher.
    """
    num_nodes = len(core.first) - 1
    position = np.full(num_nodes, -1, dtype=np.int64)
    touched = np.zeros(num_nodes, dtype=np.int64)
    queue = np.empty(num_nodes, dtype=np.int64)
    members = np.empty(most_nodes, dtype=np.int64)
    parent = np.empty(most_nodes, dtype=np.int64)
    link = np.empty(most_nodes, dtype=np.int64)
    old = np.empty(most_nodes, dtype=np.int64)
    offset = np.zeros(most_nodes + 1, dtype=np.int64)
    widest = most_choices(core)
    sums = np.empty(most_nodes * widest)
    best_child = np.empty(most_nodes * widest, dtype=np.int64)
    for _ in range(num_moves):
        start = starts[next_random(state, len(starts))]
        factor = factors[next_random(state, len(factors))]
        count = grow(core, start, state, position, touched, queue, members, parent, link)
        for k in range(count):
            i = members[k]
            old[k] = choice[i]
            offset[k + 1] = offset[k] + core.first[i + 1] - core.first[i]
            for c in range(core.first[i + 1] - core.first[i]):
                sums[offset[k] + c] = theta[core.first[i] + c] + factor * price[core.first[i] + c]
            add_outside(core, i, sums, offset[k], position, choice)
        for k in range(count - 1, 0, -1):
            to, p = offset[parent[k]], parent[k]
            pass_up(
                sums, offset[k], offset[k + 1] - offset[k], to, offset[p + 1] - to,
                core.table[link[k]], core.target[link[k]] == members[k], core.float_pool,
                best_child, k * widest,
            )  # fmt: skip
        new = choice[start]
        for c in range(offset[1]):
            if sums[c] < sums[new]:
                new = c
        before = tree[2 * size + 1]
        change, moved = 0.0, False
        for k in range(count):
            i = members[k]
            if k > 0:
                new = best_child[k * widest + choice[members[parent[k]]]]
            if new != old[k]:
                moved = True
                change += price[core.first[i] + new] - price[core.first[i] + old[k]]
                set_choice(core, i, new, choice, tree, size)
        if moved:
            for k in range(count):
                change += change_of_cost(core, k, members[k], old, theta, position, choice)
            peak = tree[2 * size + 1]
            kept = peak <= before if before > limit else peak <= limit and change <= 0.0
            for k in range(count):
                if not kept and choice[members[k]] != old[k]:
                    set_choice(core, members[k], old[k], choice, tree, size)
        for k in range(count):
            i = members[k]
            position[i] = -1
            touched[i] = 0
            for at in range(core.near_first[i], core.near_first[i + 1]):
                e = core.near_edge[at]
                touched[core.source[e]] = 0
                touched[core.target[e]] = 0
