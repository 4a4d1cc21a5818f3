"""Plans from the relaxation: fix one choice after another and let the rest follow.

Where memory binds, the relaxation is nearly integral: a node or two are split between a choice that
is fast and one that is small. Each run starts from the last basis and takes few steps. On problems
of 200 nodes with the limit binding, the better of the two dives was within 0.2 % of the optimum;
the integer program is then small, for whatever its reduced cost puts beyond that gap is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.ir.problem import FloatArray, IntArray
from autopar.solver.adapter import Highs, Outcome
from autopar.solver.ilp import Model
from autopar.solver.memory import total_usages
from autopar.solver.search import Search

_INTEGRAL = 1e-6
_MAX_STEPS = 40
_MAX_WINDOWED_STEPS = 8
"""With windows a step takes long, and few nodes are split."""

_PATIENCE = 0.5
"""Steps of the simplex method per row after which a dive ends, with windows: it takes up to 0.35
where one choice leaves most as it is, and thrice as many as the relaxation where it moves all."""

_LITTLE_PATIENCE = 0.05
"""The same, where another search follows."""


_Order = Callable[[FloatArray, IntArray], IntArray]
"""Values and usages of a node's split choices to their order of preference."""


def rounded(model: Model, values: FloatArray) -> tuple[int, ...]:
    """Per node the choice with the largest value (the first of equals)."""
    padded = np.append(values, -1.0)
    return tuple(int(np.argmax(padded[columns])) for columns in model.choices)


def num_fractional(model: Model, values: FloatArray) -> int:
    """How many choices are neither taken nor left."""
    chosen = values[model.integer]
    return int(((chosen > _INTEGRAL) & (chosen < 1 - _INTEGRAL)).sum())


def dive(
    state: Search, model: Model, highs: Highs, values: FloatArray, *, once: bool = False
) -> None:
    """Offers `state` what diving from the relaxation's `values` finds, once by value and, unless
    that is to be all, once by size.

    Leaves all columns of `highs` free again.
    """
    sizes = total_usages(state.problem)
    orders = (_largest_value_first, _least_usage_first)
    patience = (_LITTLE_PATIENCE if once else _PATIENCE) * model.num_rows
    most = int(patience) if model.windows else None
    for order in orders[:1] if once else orders:
        _dive(state, model, highs, values, sizes, order, most)
        highs.free()
        if state.settled:
            return


def _largest_value_first(values: FloatArray, usages: IntArray) -> IntArray:
    return np.lexsort((usages, -values))


def _least_usage_first(values: FloatArray, usages: IntArray) -> IntArray:
    return np.lexsort((-values, usages))


def _dive(
    state: Search,
    model: Model,
    highs: Highs,
    values: FloatArray,
    sizes: Sequence[IntArray],
    order: _Order,
    most: int | None,
) -> None:
    for _ in range(_MAX_WINDOWED_STEPS if model.windows else _MAX_STEPS):
        node, split = _most_split(model, values, sizes)
        if node < 0 or state.clock.expired:
            return
        preferred = split[order(values[model.choices[node][split]], sizes[node][split])]
        if not _settle(state, highs, model.choices[node][preferred], most):
            return
        values = highs.last.values
        choice = rounded(model, values)
        state.offer(choice, state.evaluator(choice))
        best = state.evaluation
        if best is not None and highs.last.objective > (best.objective - 1) * model.cost_scale:
            return


def _most_split(
    model: Model, values: FloatArray, sizes: Sequence[IntArray]
) -> tuple[int, IntArray]:
    """The node whose split choices differ most in usage, with these; (-1, ...) if none is split."""
    padded = np.append(values, 0.0)
    found, widest = (-1, np.empty(0, dtype=np.int64)), -1
    for node, columns in enumerate(model.choices):
        there = padded[columns]
        split = np.flatnonzero((there > _INTEGRAL) & (there < 1 - _INTEGRAL))
        if len(split) and (width := int(np.ptp(sizes[node][split]))) > widest:
            found, widest = (node, split), width
    return found


def _settle(state: Search, highs: Highs, columns: IntArray, most: int | None) -> bool:
    """Fixes the first of `columns` at one that leaves the relaxation feasible, as far as that is
    known after `most` steps of the simplex method."""
    for column in columns:
        only = np.array([column])
        highs.fix(only, 1.0)
        outcome = highs.solve_warm(most).outcome
        if outcome is not Outcome.INFEASIBLE:
            return outcome is Outcome.OPTIMAL
        highs.fix(only, 0.0)
    return False
