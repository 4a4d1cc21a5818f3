"""The compiled pass that says what every choice costs at the least."""

# numba has no types of its own, and inside compiled functions numpy's scalars are Python's.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none
# pyright: reportUntypedFunctionDecorator=none, reportUnknownVariableType=none
# pyright: reportReturnType=none, reportArgumentType=none

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FloatArray, IntArray
from autopar.solver.message_passing.kernels import compiled, rows_least


@compiled
def least_costs(
    first: IntArray,
    theta: FloatArray,
    source: IntArray,
    target: IntArray,
    table: IntArray,
    pool: FloatArray,
    source_message: IntArray,
    target_message: IntArray,
    message: FloatArray,
    of_nodes: FloatArray,
    of_edges: FloatArray,
    row: FloatArray,
) -> None:
    """Sets the least of every node and of every edge after `message`; `row` is room to work in."""
    own = theta.copy()
    for e in range(len(source)):
        a, b = source[e], target[e]
        rows, columns = first[a + 1] - first[a], first[b + 1] - first[b]
        rows_least(False, table[e], rows, target_message[e], columns, pool, message, row)
        of_edges[e] = np.inf
        for c in range(rows):
            of_edges[e] = min(of_edges[e], row[c] - message[source_message[e] + c])
            own[first[a] + c] += message[source_message[e] + c]
        for d in range(columns):
            own[first[b] + d] += message[target_message[e] + d]
    for i in range(len(first) - 1):
        of_nodes[i] = own[first[i] : first[i + 1]].min()


@compiled
def weigh(
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
    at_least: FloatArray,
) -> None:
    """One pass of message passing, as `kernels.sweep` makes it, that raises `at_least[label]` to
    the bound on plans with that choice: what all other nodes and edges cost at the least, and at
    the node in hand, before it hands its costs on, the choice itself and the best row of each of
    its edges."""
    widest = 0
    for i in range(len(first) - 1):
        widest = max(widest, first[i + 1] - first[i])
    own, with_rows = np.empty(widest), np.empty(widest)
    rows = np.empty(widest)
    of_nodes, of_edges = np.empty(len(first) - 1), np.empty(len(source))
    least_costs(
        first,
        theta,
        source,
        target,
        table,
        pool,
        source_message,
        target_message,
        message,
        of_nodes,
        of_edges,
        rows,
    )
    total = of_nodes.sum() + of_edges.sum()
    num_nodes = len(first) - 1
    for step in range(num_nodes):
        i = step if upward else num_nodes - 1 - step
        begin, size = first[i], first[i + 1] - first[i]
        middle = near_first[i] + near_split[i]
        total -= of_nodes[i]
        num_later, num_earlier = 0, 0
        for c in range(size):
            own[c] = theta[begin + c]
        for at in range(near_first[i], near_first[i + 1]):
            e, is_target = near_edge[at], at < middle
            total -= of_edges[e]
            base = target_message[e] if is_target else source_message[e]
            if is_target == upward:
                num_earlier += 1
                other = source[e] if is_target else target[e]
                there = source_message[e] if is_target else target_message[e]
                rows_least(
                    is_target,
                    table[e],
                    size,
                    there,
                    first[other + 1] - first[other],
                    pool,
                    message,
                    rows,
                )
                for c in range(size):
                    message[base + c] = rows[c]
                of_edges[e] = 0.0
            else:
                num_later += 1
            for c in range(size):
                own[c] += message[base + c]
        share = 1.0 / max(num_later, num_earlier, 1)
        for c in range(size):
            with_rows[c] = own[c]
        for at in range(near_first[i], near_first[i + 1]):
            e, is_target = near_edge[at], at < middle
            if is_target == upward:
                continue
            base = target_message[e] if is_target else source_message[e]
            other = source[e] if is_target else target[e]
            there = source_message[e] if is_target else target_message[e]
            rows_least(
                is_target,
                table[e],
                size,
                there,
                first[other + 1] - first[other],
                pool,
                message,
                rows,
            )
            of_edges[e] = np.inf
            for c in range(size):
                with_rows[c] += rows[c] - message[base + c]
                message[base + c] -= share * own[c]
                of_edges[e] = min(of_edges[e], rows[c] - message[base + c])
        left = 1.0 - share * num_later
        of_nodes[i] = np.inf
        for c in range(size):
            at_least[begin + c] = max(at_least[begin + c], total + with_rows[c])
            of_nodes[i] = min(of_nodes[i], left * own[c])
        total += of_nodes[i]
        for at in range(near_first[i], near_first[i + 1]):
            total += of_edges[near_edge[at]]
