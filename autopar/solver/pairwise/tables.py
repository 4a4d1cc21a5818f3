"""Distinct cost tables of edges, with a cache of the operations on them.

Problems of real models repeat the same few thousand tables over tens of thousands of edges. Each
table has a number, and the result of every operation is cached by the numbers (and picked rows) it
was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple

import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, IntArray, Problem
from autopar.solver.windows import with_choices

_Arguments = TypeVarTuple("_Arguments")
_Value = TypeVar("_Value")


def _remembered(
    work_out: Callable[[Tables, *_Arguments], _Value],
) -> Callable[[Tables, *_Arguments], _Value]:
    """`work_out`, computed once for each of its arguments."""

    @wraps(work_out)
    def remembered(self: Tables, *args: *_Arguments) -> _Value:
        key = (work_out.__name__, *args)
        if key not in self.known:
            self.known[key] = work_out(self, *args)
        return self.known[key]

    return remembered


@dataclass(slots=True)
class Tables:
    """Distinct tables by number; entries are costs, `FORBIDDEN` where a pair is not allowed.
    `known` is the cache of operations."""

    by_number: list[IntArray] = field(default_factory=list[IntArray])
    _numbers: dict[tuple[tuple[int, ...], bytes], int] = field(
        default_factory=dict[tuple[tuple[int, ...], bytes], int]
    )
    known: dict[tuple[object, ...], Any] = field(default_factory=dict[tuple[object, ...], Any])

    def __getitem__(self, number: int) -> IntArray:
        return self.by_number[number]

    def add(self, table: IntArray) -> int:
        """The number of `table`."""
        table = np.ascontiguousarray(table)
        key = (table.shape, table.tobytes())
        number = self._numbers.get(key)
        if number is None:
            number = len(self.by_number)
            self._numbers[key] = number
            self.by_number.append(table)
        return number

    @_remembered
    def transposed(self, number: int) -> int:
        """The same costs with rows and columns exchanged."""
        return self.add(self[number].T)

    @_remembered
    def possible_rows(self, number: int) -> BoolArray | None:
        """Which rows have an entry that is allowed; None when all have."""
        possible: BoolArray = np.any(self[number] < FORBIDDEN, axis=1)
        return None if possible.all() else possible

    def rows(self, number: int, picked: IntArray) -> int:
        """The table made of the rows `picked`."""
        return self._rows(number, picked.tobytes())

    @_remembered
    def _rows(self, number: int, picked: bytes) -> int:
        return self.add(self[number][np.frombuffer(picked, np.int64)])

    @_remembered
    def sum(self, first: int, second: int) -> int:
        """The costs of both."""
        return self.add(added(self[first], self[second]))

    @_remembered
    def column_of_row(self, number: int) -> IntArray | None:
        """Where every row has one entry that is allowed: its column; else None."""
        allowed = self[number] < FORBIDDEN
        return allowed.argmax(axis=1) if (allowed.sum(axis=1) == 1).all() else None

    @_remembered
    def parts(self, number: int) -> tuple[IntArray, IntArray] | None:
        """`(a, b)` where the table is `a[row] + b[column]`; else None. Neither is below 0 if no
        entry is, so that node costs stay a lower bound."""
        table = self[number]
        if (table >= FORBIDDEN).any():
            return None
        cheapest = table[0].argmin()
        a, b = table[:, cheapest], table[0] - table[0, cheapest]
        return (a, b) if np.array_equal(a[:, None] + b[None, :], table) else None


def added(a: IntArray, b: IntArray) -> IntArray:
    """The sum, `FORBIDDEN` where either is. Callers ensure that allowed sums stay below that."""
    forbidden = (a >= FORBIDDEN) | (b >= FORBIDDEN)
    return np.where(forbidden, FORBIDDEN, np.where(forbidden, 0, a) + np.where(forbidden, 0, b))


def keep_choices(problem: Problem, kept: Sequence[IntArray]) -> Problem:
    """`problem` with the choices `kept[i]` of every node, in that order."""
    return replace(
        problem,
        labels=tuple(
            tuple(labels[int(c)] for c in some)
            for labels, some in zip(problem.labels, kept, strict=True)
        ),
        costs=tuple(costs[some] for costs, some in zip(problem.costs, kept, strict=True)),
        usages=tuple(
            tuple(replace(usage, amounts=usage.amounts[some]) for usage in usages)
            for usages, some in zip(problem.usages, kept, strict=True)
        ),
        edges=tuple(
            replace(e, cost=e.cost[np.ix_(kept[e.source], kept[e.target])]) for e in problem.edges
        ),
        flows=tuple(
            replace(
                flow,
                source_state=flow.source_state[kept[flow.source]],
                sinks=tuple(replace(s, state=s.state[kept[s.node]]) for s in flow.sinks),
            )
            for flow in problem.flows
        ),
        windows=with_choices(problem.windows, kept),
    )
