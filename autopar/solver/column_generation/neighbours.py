"""The choices next to a plan: those that differ from it on one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.ir.problem import Flow, IntArray, Problem

BoolArray = npt.NDArray[np.bool_]


def near(problem: Problem, choice: Sequence[int]) -> list[IntArray]:
    """Per node the choices under which every tensor it makes or asks for is next to what it is
    under `choice`. Of a node without flows, its own alone."""
    found: list[BoolArray | None] = [None] * len(problem.costs)
    for flow in problem.flows:
        adjacent = _adjacent(flow)
        ends = [(flow.source, flow.source_state), *((s.node, s.state) for s in flow.sinks)]
        for node, state in ends:
            there = adjacent[state[choice[node]], state]
            before = found[node]
            found[node] = there if before is None else before & there
    return [
        np.array([c]) if there is None else np.flatnonzero(there)
        for c, there in zip(choice, found, strict=True)
    ]


def _adjacent(flow: Flow) -> BoolArray:
    """Which states are next to each other: by their placements or, where they have none, by an arc,
    whichever way it leads. Nothing, the last, is next to all."""
    size = len(flow.states)
    joined = np.ones((size + 1, size + 1), dtype=np.bool_)
    if flow.placements is None:
        joined[:size, :size] = np.eye(size, dtype=np.bool_)
        joined[flow.tails, flow.heads] = joined[flow.heads, flow.tails] = True
    else:
        differs = flow.placements[:, None, :] != flow.placements[None, :, :]
        joined[:size, :size] = differs.sum(axis=2) <= 1
    return joined
