"""The choices next to a plan: one step away from it in every tensor they touch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.problem import Flow, IntArray, Problem

BoolArray = npt.NDArray[np.bool_]


def near(problem: Problem, choice: Sequence[int]) -> list[IntArray]:
    """Per node the choices that make and ask for what `choice` does or for what a single arc leads
    to or from: on a mesh, those that differ on one axis. Of a node without flows, its own alone."""
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
    """Which states an arc joins, whichever way it leads; nothing, the last, is next to all."""
    size = len(flow.states)
    joined = np.eye(size + 1, dtype=np.bool_)
    joined[flow.tails, flow.heads] = joined[flow.heads, flow.tails] = True
    joined[size] = joined[:, size] = True
    return joined
