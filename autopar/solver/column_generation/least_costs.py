"""The compiled pass that says what every choice costs at the least."""

# Inside compiled functions numpy's scalars are Python's.
# pyright: reportReturnType=none, reportArgumentType=none

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FloatArray
from autopar.solver.pairwise.compiling import compiled
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.kernels import rows_least


@compiled
def least_costs(
    core: Core,
    theta: FloatArray,
    message: FloatArray,
    of_nodes: FloatArray,
    of_edges: FloatArray,
    row: FloatArray,
) -> None:
    """Sets the least of every node and of every edge after `message`; `row` is room to work in."""
    own = theta.copy()
    for e in range(len(core.source)):
        a, b = core.source[e], core.target[e]
        rows, columns = core.first[a + 1] - core.first[a], core.first[b + 1] - core.first[b]
        rows_least(core, e, False, message, row)
        of_edges[e] = np.inf
        for c in range(rows):
            of_edges[e] = min(of_edges[e], row[c] - message[core.source_message[e] + c])
            own[core.first[a] + c] += message[core.source_message[e] + c]
        for d in range(columns):
            own[core.first[b] + d] += message[core.target_message[e] + d]
    for i in range(len(core.first) - 1):
        of_nodes[i] = own[core.first[i] : core.first[i + 1]].min()


@compiled
def weigh(
    core: Core, upward: bool, theta: FloatArray, message: FloatArray, at_least: FloatArray
) -> None:
    """One pass of message passing, as `kernels.sweep` makes it, that raises `at_least[label]` to
    the bound on plans with that choice: what all other nodes and edges cost at the least, and at
    the node in hand, before it hands its costs on, the choice itself and the best row of each of
    its edges."""
    num_nodes, widest = len(core.first) - 1, np.max(np.diff(core.first))
    own, with_rows, rows = np.empty(widest), np.empty(widest), np.empty(widest)
    of_nodes, of_edges = np.empty(num_nodes), np.empty(len(core.source))
    least_costs(core, theta, message, of_nodes, of_edges, rows)
    total = of_nodes.sum() + of_edges.sum()
    for step in range(num_nodes):
        i = step if upward else num_nodes - 1 - step
        begin, size = core.first[i], core.first[i + 1] - core.first[i]
        middle = core.near_first[i] + core.near_split[i]
        total -= of_nodes[i]
        num_later, num_earlier = 0, 0
        for c in range(size):
            own[c] = theta[begin + c]
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e, is_target = core.near_edge[at], at < middle
            total -= of_edges[e]
            base = core.target_message[e] if is_target else core.source_message[e]
            if is_target == upward:
                num_earlier += 1
                rows_least(core, e, is_target, message, rows)
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
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e, is_target = core.near_edge[at], at < middle
            if is_target == upward:
                continue
            base = core.target_message[e] if is_target else core.source_message[e]
            rows_least(core, e, is_target, message, rows)
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
        for at in range(core.near_first[i], core.near_first[i + 1]):
            total += of_edges[core.near_edge[at]]
