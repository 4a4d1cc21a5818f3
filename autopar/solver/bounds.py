"""A lower bound on the cost from the duals of the relaxation, worked out again from the model.

For any multipliers `u` of the rows (of the right sign), every `x` in [0, 1] that meets the rows has
`cost x >= u b + sum_j min(0, cost_j - u A_j)`: weak duality. So the bound holds whatever the
tolerances of the solver that found `u`; only the rounding of these sums is left, which
`ROUNDING` times the sum of their sizes covers many times over. The dual of a node's row is raised
until its cheapest choice has a reduced cost of zero: exactly one of them is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import BoolArray, FloatArray
from autopar.solver.ilp import Model

ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class DualBound:
    """`value` is below every solution's cost; a plan whose cost is at most `value + gap` has column
    `j` at most at `gap / reduced_costs[j]` where that is above 0, so at 0 if it is 0 or 1 and
    `reduced_costs[j] > gap`; likewise near 1 where it is below 0; and the slack of row `i` at most
    `gap / |row_duals[i]|`."""

    value: float
    reduced_costs: FloatArray
    row_duals: FloatArray


def dual_bound(model: Model, row_duals: FloatArray, absent: BoolArray | None = None) -> DualBound:
    """The bound that `row_duals` (per row, in units of the cost) prove.

    It holds for the plans that use no column of `absent`: their reduced cost is infinite.
    """
    at_lower, at_upper = np.isfinite(model.row_lower), np.isfinite(model.row_upper)
    duals = np.where((row_duals > 0) & ~at_lower, 0.0, row_duals)
    duals = np.where((duals < 0) & ~at_upper, 0.0, duals)
    per_entry = model.values * np.repeat(duals, np.diff(model.row_starts))
    priced = np.bincount(model.columns, weights=per_entry, minlength=model.num_columns)
    reduced = model.cost.astype(np.float64) - priced
    if absent is not None:
        reduced[absent] = np.inf
    for node, columns in enumerate(model.choices):
        there = columns[columns >= 0]
        least = reduced[there].min()
        reduced[there] -= least
        duals[node] += least
    limits = np.where(duals > 0, model.row_lower, model.row_upper)
    limits = np.where(duals == 0, 0.0, limits)
    terms = np.concatenate([duals * limits, np.minimum(reduced, 0.0)])
    slack = ROUNDING * float(np.abs(terms).sum() + np.abs(per_entry).max(initial=0.0))
    return DualBound(float(terms.sum()) - slack, reduced, duals)


def least_cost(model: Model) -> float:
    """The bound that needs no solver: what the nodes cost at the least, everything else free."""
    total = float(np.minimum(model.cost[~model.integer], 0).sum())
    for columns in model.choices:
        there = columns[columns >= 0]
        total += float(model.cost[there].min()) if len(there) else 0.0
    return total - ROUNDING * abs(total)
