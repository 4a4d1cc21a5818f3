"""Shortest ways between the states of a flow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.problem import FORBIDDEN, Flow, IntArray


def all_distances(flows: Sequence[Flow]) -> list[IntArray]:
    """Per flow, the cost of the shortest way from state to state (Floyd and Warshall), `FORBIDDEN`
    where there is none. Flows with equal arcs share one array."""
    known: dict[tuple[int, bytes, bytes, bytes], IntArray] = {}
    found: list[IntArray] = []
    for flow in flows:
        size = len(flow.states)
        key = (size, flow.tails.tobytes(), flow.heads.tobytes(), flow.costs.tobytes())
        if key not in known:
            known[key] = _distances(flow)
        found.append(known[key])
    return found


def _distances(flow: Flow) -> IntArray:
    size = len(flow.states)
    distance = np.full((size, size), FORBIDDEN, dtype=np.int64)
    np.fill_diagonal(distance, 0)
    np.minimum.at(distance, (flow.tails, flow.heads), flow.costs)
    for middle in range(size):
        # Twice FORBIDDEN still fits; the minimum brings it back to FORBIDDEN.
        np.minimum(distance, distance[:, middle, None] + distance[None, middle], out=distance)
    return distance
