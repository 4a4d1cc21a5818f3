"""Columns, rows and entries of a linear program, collected as they are added, each with a name; and
the tie weights of choices, computed from their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from autopar.ir.problem import FloatArray, IntArray, Label, Problem

_NAME_SIZE = 4
_ODD = 0x1E3779B97F4A7C15
"""An odd number, so that no two names become one when they are multiplied by it."""


class NameKind(IntEnum):
    """The first number of a name: what the column or row stands for."""

    CHOICE = 0
    EDGE = 1
    ARC = 2
    STATE = 3
    WINDOW = 4
    LIMIT = 5
    EXCESS = 6


@dataclass(slots=True)
class ProgramBuilder:
    """Collects columns and rows, and entries as (row, column, value) arrays."""

    costs: list[IntArray] = field(default_factory=list[IntArray])
    column_names: list[IntArray] = field(default_factory=list[IntArray])
    row_names: list[IntArray] = field(default_factory=list[IntArray])
    num_columns: int = 0
    entries: list[tuple[IntArray, IntArray, FloatArray]] = field(
        default_factory=list[tuple[IntArray, IntArray, FloatArray]]
    )
    lower: list[FloatArray] = field(default_factory=list[FloatArray])
    upper: list[FloatArray] = field(default_factory=list[FloatArray])
    num_rows: int = 0

    def add_columns(self, costs: IntArray, *name: int | IntArray) -> IntArray:
        """New columns with these costs; returns their indices. `name` has the numbers of their
        names: a number for all columns, or an array with one per column."""
        first = self.num_columns
        self.costs.append(costs)
        self.column_names.append(_names(len(costs), name))
        self.num_columns += len(costs)
        return np.arange(first, self.num_columns)

    def add_rows(self, count: int, lower: float, upper: float, *name: int | IntArray) -> IntArray:
        """New rows, all with the same limits; returns their indices. Names are as for columns."""
        first = self.num_rows
        self.row_names.append(_names(count, name))
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.num_rows += count
        return np.arange(first, self.num_rows)

    def add_entries(self, rows: IntArray, columns: IntArray, value: float | FloatArray) -> None:
        """Coefficients; those at the same place add up."""
        self.entries.append((rows, columns, np.broadcast_to(np.float64(value), rows.shape)))


def _names(count: int, parts: Sequence[int | IntArray]) -> IntArray:
    names = np.zeros((count, _NAME_SIZE), dtype=np.int64)
    for place, part in enumerate(parts):
        names[:, place] = part
    return names


def places_of(count: int) -> IntArray:
    """0, 1, ... for each of `count`, as parts of names."""
    return np.arange(count, dtype=np.int64)


@lru_cache(maxsize=1 << 16)
def name_of(text: str) -> int:
    """A part of a name, from a text such as a key or a state."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def joined_name(first: int | IntArray, second: int | IntArray) -> IntArray:
    """One part of a name for two, in this order."""
    with np.errstate(over="ignore"):
        return np.asarray(first, np.int64) * np.int64(_ODD) + np.asarray(second, np.int64)


# How ties are broken: among all plans of the lowest cost, the one of the lowest tie weight.
#
# A choice weighs `blake2b(node key, choice label) mod 2**20`, and a plan the sum of its choices.
# Only canonical names enter, so the answer depends neither on the order of nodes and choices nor on
# a seed, a thread or the solver. The weights are a second objective of their own, not a small term
# of the first one: costs are nanoseconds, a step takes 10^9 of them, and a term whose sum stays
# below one of them would lie under the tolerances of a floating-point solver.

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
    digests = (blake2b(f"{key}\0{label}".encode(), digest_size=8).digest() for label in labels)
    weights = [int.from_bytes(digest, "big") % WEIGHT_LIMIT for digest in digests]
    return np.array(weights, dtype=np.int64)
