"""Tables without the rows and columns that they have twice.

A table of what a tensor costs between two ops has a row per choice of the one that makes it, and
choices that make it in one state have equal rows: on three axes half of all entries are there again
in another row or column, and message passing reads all of them in every sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.ir.problem import FORBIDDEN, FloatArray, IntArray

_LARGE, _WORTH = 500, 0.7
"""Entries of a table from which it is looked at, and the part of them that may be left at most for
the way by places to take less than reading all."""

_ODD = np.int64(-7046029254386353131)
"""An odd number without a pattern in its bits: sums of products with it tell rows apart."""


class Lean(NamedTuple):
    """The fields of a `Core` that begin with `lean_`, by the rest of their names."""

    table: IntArray
    rows: IntArray
    columns: IntArray
    place: IntArray
    pool: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Distinct:
    """The rows and columns of a table that differ, and where each label is among them."""

    table: IntArray
    places: IntArray


def lean_tables(tables: Sequence[IntArray], at: IntArray, too_much: float) -> Lean:
    """Of edges of which `e` has `tables[at[e]]`. What is `FORBIDDEN` costs `too_much`."""
    found = [_lean(table) for table in tables]
    worth = [each for each in found if each is not None]
    none: IntArray = np.empty(0, dtype=np.int64)
    starts = np.cumsum([0, *(0 if each is None else each.table.size for each in found)]).tolist()
    table = [-1 if each is None else starts[k] for k, each in enumerate(found)]
    sizes = [(0, 0) if each is None else each.table.shape for each in found]
    rows, columns = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    places: list[IntArray] = [
        np.zeros(sum(whole.shape), dtype=np.int64) if each is None else each.places
        for whole, each in zip(tables, found, strict=True)
    ]
    of_edges: list[IntArray] = [places[int(k)] for k in at]
    left: list[IntArray] = [none, *(each.table.ravel() for each in worth)]
    pool = np.concatenate(left)
    return Lean(
        table=np.array(table, dtype=np.int64)[at],
        rows=rows[at],
        columns=columns[at],
        place=np.concatenate([none, *of_edges]),
        pool=np.where(pool >= FORBIDDEN, too_much, pool.astype(np.float64)),
    )


def _lean(table: IntArray) -> _Distinct | None:
    """What of it differs; None where leaving the rest out is not worth its while."""
    if table.size < _LARGE:
        return None
    rows, row_places = _distinct_rows(table)
    columns, column_places = _distinct_rows(table.T)
    if len(rows) * len(columns) > _WORTH * table.size:
        return None
    return _Distinct(table[np.ix_(rows, columns)], np.concatenate([row_places, column_places]))


def _distinct_rows(table: IntArray) -> tuple[IntArray, IntArray]:
    """The first of all rows that are equal, and per row the place of its equal among them."""
    weights: IntArray = np.arange(1, 2 * table.shape[1], 2, dtype=np.int64) * _ODD
    sums: IntArray = table @ np.bitwise_xor(weights, weights >> 29)
    _, first, places = np.unique(sums, return_index=True, return_inverse=True)
    if not np.array_equal(table[first[places]], table):
        # Two rows come to the same sum by chance.
        every: IntArray = np.arange(len(table), dtype=np.int64)
        return every, every
    return first.astype(np.int64), places.astype(np.int64)
