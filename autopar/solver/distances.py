"""Shortest ways between the states of a flow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autopar.ir.problem import FORBIDDEN, Flow, IntArray

_MOST_KEPT = 256
"""How many are kept: a problem on three axes has some 130 that differ, and all of them are asked
for with each of its programs."""


def all_distances(flows: Sequence[Flow]) -> list[IntArray]:
    """`shortest_distances` of each flow. Flows with equal arcs share one array, which is not to be
    written."""
    return [
        _known(len(f.states), f.tails.tobytes(), f.heads.tobytes(), f.costs.tobytes())
        for f in flows
    ]


def shortest_distances(size: int, tails: IntArray, heads: IntArray, costs: IntArray) -> IntArray:
    """The cost of the shortest way from state to state (Floyd and Warshall), by arcs between
    `size` of them; `FORBIDDEN` where there is none."""
    found = np.full((size, size), FORBIDDEN, dtype=np.int64)
    np.fill_diagonal(found, 0)
    np.minimum.at(found, (tails, heads), costs)
    for middle in range(size):
        # Twice FORBIDDEN still fits; the minimum brings it back to FORBIDDEN.
        np.minimum(found, found[:, middle, None] + found[None, middle], out=found)
    return found


@lru_cache(_MOST_KEPT)
def _known(size: int, tails: bytes, heads: bytes, costs: bytes) -> IntArray:
    found = shortest_distances(
        size, *(np.frombuffer(each, np.int64) for each in (tails, heads, costs))
    )
    found.flags.writeable = False
    return found
