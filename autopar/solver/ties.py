"""How ties are broken: among all plans of the lowest cost, the one of the lowest tie weight.

A choice weighs `blake2b(node key, choice label) mod 2**20`, and a plan the sum of its choices. Only
canonical names enter, so the answer depends neither on the order of nodes and choices nor on a
seed, a thread or the solver. The weights are a second objective of their own and not a small term
of the first one: costs are nanoseconds, a step takes 10^9 of them, and a term whose sum stays below
one of them would lie under the tolerances of a floating-point solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from autopar.ir.problem import IntArray, Label, Problem

WEIGHT_LIMIT = 1 << 20


def tie_weights(problem: Problem) -> tuple[IntArray, ...]:
    """Per node the weight of each choice, in [0, `WEIGHT_LIMIT`)."""
    return tuple(
        _weights(key, labels) for key, labels in zip(problem.keys, problem.labels, strict=True)
    )


def tie_weight(weights: Sequence[IntArray], choice: Sequence[int]) -> int:
    """The tie weight of a plan."""
    return sum(int(w[c]) for w, c in zip(weights, choice, strict=True))


def _weights(key: str, labels: Sequence[Label]) -> IntArray:
    prefix = blake2b(key.encode() + b"\0", digest_size=8)
    weights: list[int] = []
    for label in labels:
        digest = prefix.copy()
        digest.update(str(label).encode())
        weights.append(int.from_bytes(digest.digest(), "big") % WEIGHT_LIMIT)
    return np.array(weights, dtype=np.int64)
