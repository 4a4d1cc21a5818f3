"""What ways of tensors cost where the savings of windows are taken off arcs (`windows.weighed`).

A tensor takes a fastest way by the costs that arcs have. By what is left of them after savings,
slower ways may be cheaper: a bound on plans that take them would be one of plans that there are not
(three axes of 8x8x8 devices, Llama-8B: 3 % below the relaxation).
"""

# Inside compiled functions numpy's scalars are Python's.
# pyright: reportReturnType=none, reportArgumentType=none

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.problem import FORBIDDEN, Flow, IntArray
from autopar.solver.pairwise.compiling import compiled


def distances_weighed(flows: Sequence[Flow], weighed: Sequence[Flow]) -> list[IntArray]:
    """Per flow and from state to state, the least that a fastest way comes to by the costs that
    arcs have in `weighed`, which are not below 0; `FORBIDDEN` where there is no way."""
    known: dict[tuple[int, bytes, bytes, bytes, bytes], IntArray] = {}
    found: list[IntArray] = []
    for flow, other in zip(flows, weighed, strict=True):
        ends = (len(flow.states), flow.tails.tobytes(), flow.heads.tobytes())
        key = (*ends, flow.costs.tobytes(), other.costs.tobytes())
        if key not in known:
            arcs = (flow.tails, flow.heads, flow.costs, other.costs)
            known[key] = _least_of_fastest(len(flow.states), *arcs)
        found.append(known[key])
    return found


@compiled
def _least_of_fastest(
    size: int, tails: IntArray, heads: IntArray, costs: IntArray, weighed: IntArray
) -> IntArray:
    """Floyd and Warshall's recursion on pairs of costs, of which the first that differs counts."""
    first = np.full((size, size), FORBIDDEN)
    second = np.full((size, size), FORBIDDEN)
    for state in range(size):
        first[state, state] = second[state, state] = 0
    for a in range(len(tails)):
        i, j = tails[a], heads[a]
        is_less = costs[a] < first[i, j]
        if is_less or (costs[a] == first[i, j] and weighed[a] < second[i, j]):
            first[i, j], second[i, j] = costs[a], weighed[a]
    for middle in range(size):
        for i in range(size):
            if first[i, middle] >= FORBIDDEN:
                continue
            for j in range(size):
                way = first[i, middle] + first[middle, j]
                least = second[i, middle] + second[middle, j]
                if way < first[i, j] or (way == first[i, j] and least < second[i, j]):
                    first[i, j], second[i, j] = way, least
    return np.where(first >= FORBIDDEN, FORBIDDEN, second)
