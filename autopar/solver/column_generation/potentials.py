"""What a flow charges those who use it, and credits the one who makes it, per state.

In the relaxation, a commodity of a flow has a price at every state: a sink pays it, the source gets
it, and over an arc it rises by at most the part of the arc's cost that falls to the commodity. The
duals of the master's balances are such prices, but only for states of its ways. Prices of other
states are open between two: a sink would pay no more than a way from a known state costs, a source
would get no less than a way on to one saves. Message passing starts from the middle, which rises
over no arc by more than that costs, as both of them do (it raises the bound further, and sooner,
than from the one for sinks and the other for sources), and settles them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.problem import FORBIDDEN, FloatArray, IntArray, Problem
from autopar.solver.ilp import Model, distinct_sinks

Potentials = tuple[tuple[FloatArray, ...], ...]
"""Per flow and commodity, in the order of `distinct_sinks`, the price at each state."""


def no_potentials(problem: Problem) -> Potentials:
    """All prices zero."""
    return tuple(
        (np.zeros(len(flow.states)),) * len(distinct_sinks(flow)) for flow in problem.flows
    )


def potentials(
    problem: Problem,
    kept: Sequence[IntArray],
    model: Model,
    row_duals: FloatArray,
    distances: Sequence[IntArray],
) -> Potentials:
    """The prices, for the flows of `problem`, that `row_duals` (in units of the cost) stand for;
    `model` is of the master, `problem` with the choices `kept`.

    Sinks of one node that ask alike there are one commodity of the master, though they may be two
    of the problem: the first bears the price.
    """
    found: list[tuple[FloatArray, ...]] = []
    for flow, balances, distance in zip(problem.flows, model.balances, distances, strict=True):
        left: dict[tuple[int, bytes], IntArray] = {}
        for node, states in distinct_sinks(flow):
            key = (node, states[kept[node]].tobytes())
            if key not in left:
                left[key] = balances[len(left)]
        of_flow: list[FloatArray] = []
        for node, states in distinct_sinks(flow):
            state = states[kept[node]]
            rows = left.pop((node, state.tobytes()), np.full(len(flow.states), -1))
            of_flow.append(_potential(rows, row_duals, distance))
        found.append(tuple(of_flow))
    return tuple(found)


def _potential(rows: IntArray, row_duals: FloatArray, distance: IntArray) -> FloatArray:
    known = np.flatnonzero(rows >= 0)
    if not len(known):
        return np.zeros(len(rows))
    price: FloatArray = -row_duals[rows[known]]
    way: FloatArray = np.where(distance >= FORBIDDEN, np.inf, distance.astype(np.float64))
    most: FloatArray = (price[:, None] + way[known]).min(axis=0)
    least: FloatArray = (price[None, :] - way[:, known]).max(axis=1)
    most = np.where(np.isfinite(most), most, least)
    least = np.where(np.isfinite(least), least, most)
    reached = np.isfinite(most)
    return np.where(
        reached, (np.where(reached, most, 0.0) + np.where(reached, least, 0.0)) / 2, 0.0
    )
