"""Converts a program written in PuLP to arrays."""

# PuLP has no types of its own: its results are unknown, not wrong.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none
# pyright: reportUnknownVariableType=none, reportUnknownArgumentType=none

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
import pulp

from autopar.ir.problem import FloatArray
from autopar.solver.adapter import LinearProgram


def as_arrays(program: pulp.LpProblem) -> LinearProgram:
    """The arrays of `program`, a minimization; columns are in the order of `program.variables()`,
    which sorts them by name."""
    variables, rows = program.variables(), program.constraints()
    terms = [row.expr for row in rows]
    # By identity, as PuLP compares them too: its own hash is a call of Python for each term.
    place = {id(variable): index for index, variable in enumerate(variables)}
    assert program.objective is not None
    costs = {id(variable): cost for variable, cost in program.objective.items()}
    return LinearProgram(
        costs=np.array([costs.get(id(variable), 0.0) for variable in variables]),
        lower=_limits((variable.lowBound for variable in variables), -np.inf),
        upper=_limits((variable.upBound for variable in variables), np.inf),
        row_starts=np.cumsum([0, *map(len, terms)]),
        columns=np.array([place[id(v)] for v in chain.from_iterable(terms)], np.int64),
        values=np.array([*chain.from_iterable(t.values() for t in terms)], np.float64),
        row_lower=_limits((row.getLb() for row in rows), -np.inf),
        row_upper=_limits((row.getUb() for row in rows), np.inf),
        integer=np.flatnonzero([variable.cat == pulp.LpInteger for variable in variables]),
    )


def _limits(values: Iterable[float | None], missing: float) -> FloatArray:
    return np.array([missing if value is None else value for value in values], np.float64)
