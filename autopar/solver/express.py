"""The integer linear program as a PuLP model."""

# PuLP has no types of its own: what it hands out is unknown, not wrong.
# pyright: reportMissingTypeStubs=none, reportUnknownMemberType=none

from __future__ import annotations

import numpy as np
import pulp

from autopar.solver.ilp import Model


class _Program(pulp.LpProblem):
    """A program that knows its columns and rows. PuLP gathers the columns from each row that is
    added, and again from all of them, sorted by name, each of the times that it looks at them: half
    of what it takes to state a program."""

    def __init__(self, model: Model) -> None:
        super().__init__("autopar", pulp.LpMinimize)
        self._columns = [
            self.add_variable(f"x{j:08d}", 0, 1, pulp.LpInteger if integer else pulp.LpContinuous)
            for j, integer in enumerate(model.integer.tolist())
        ]
        self._rows: list[pulp.LpConstraint] = []

    def variables(self) -> list[pulp.LpVariable]:
        """The columns, in order."""
        return self._columns

    def addConstraint(self, constraint: pulp.LpConstraint, name: str | None = None) -> None:
        """A row of columns that are known."""
        self._rows.append(constraint)

    # PuLP 3 has a property here, to be called: a method from PuLP 4 on.
    def constraints(self) -> list[pulp.LpConstraint]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rows, in order."""
        return self._rows


def express(model: Model) -> pulp.LpProblem:
    """The model in PuLP, costs times `cost_scale`; columns and rows are in the model's order. The
    limit of one on continuous columns is there for HiGHS 1.15, whose presolve was seen to run for
    ever on flows without it."""
    program = _Program(model)
    variables = program.variables()
    costs = (model.cost * model.cost_scale).tolist()
    program.setObjective(pulp.LpAffineExpression(zip(variables, costs, strict=True)))
    starts: list[int] = model.row_starts.tolist()
    columns: list[int] = model.columns.tolist()
    values: list[float] = model.values.tolist()
    limits = zip(model.row_lower.tolist(), model.row_upper.tolist(), strict=True)
    for i, (lower, upper) in enumerate(limits):
        if lower == upper:
            sense, limit = pulp.LpConstraintEQ, lower
        elif upper == np.inf:
            sense, limit = pulp.LpConstraintGE, lower
        else:
            sense, limit = pulp.LpConstraintLE, upper
        span = slice(starts[i], starts[i + 1])
        terms = zip((variables[j] for j in columns[span]), values[span], strict=True)
        row = pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=limit)
        program.addConstraint(row)
    return program
