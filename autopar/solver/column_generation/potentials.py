"""What a flow charges those who use it, and credits the one who makes it, per state.

In the relaxation, a commodity of a flow has a price at every state: a sink pays it, the source gets
it, and over an arc it rises by at most the part of the arc's cost that falls to the commodity. The
duals of the master's balances are such prices, but only for states of its ways. Between what these
allow, prices of other states are open: a sink would pay as much as a way from a known state costs
(`asked`), a source would get as little as a way on to one saves (`made`). Message passing starts
from both and settles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FORBIDDEN, FloatArray, IntArray, Problem
from autopar.solver.ilp import Model, distinct_sinks


@dataclass(frozen=True, slots=True, eq=False)
class Potential:
    """One commodity's prices per state: at most what a sink pays, at least what a source gets."""

    asked: FloatArray
    made: FloatArray


Potentials = tuple[tuple[Potential, ...], ...]
"""Per flow and commodity, in the order of `distinct_sinks`."""


def no_potentials(problem: Problem) -> Potentials:
    """All prices zero."""
    return tuple(
        (Potential(np.zeros(len(f.states)), np.zeros(len(f.states))),) * len(distinct_sinks(f))
        for f in problem.flows
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
    found: list[tuple[Potential, ...]] = []
    for flow, balances, distance in zip(problem.flows, model.balances, distances, strict=True):
        left: dict[tuple[int, bytes], IntArray] = {}
        for node, states in distinct_sinks(flow):
            key = (node, states[kept[node]].tobytes())
            if key not in left:
                left[key] = balances[len(left)]
        of_flow: list[Potential] = []
        for node, states in distinct_sinks(flow):
            state = states[kept[node]]
            rows = left.pop((node, state.tobytes()), np.full(len(flow.states), -1))
            of_flow.append(_potential(rows, row_duals, distance))
        found.append(tuple(of_flow))
    return tuple(found)


def _potential(rows: IntArray, row_duals: FloatArray, distance: IntArray) -> Potential:
    known = np.flatnonzero(rows >= 0)
    if not len(known):
        nothing = np.zeros(len(rows))
        return Potential(nothing, nothing)
    price: FloatArray = -row_duals[rows[known]]
    way: FloatArray = np.where(distance >= FORBIDDEN, np.inf, distance.astype(np.float64))
    asked: FloatArray = (price[:, None] + way[known]).min(axis=0)
    made: FloatArray = (price[None, :] - way[:, known]).max(axis=1)
    asked = np.where(np.isfinite(asked), asked, made)
    made = np.where(np.isfinite(made), made, asked)
    reached = np.isfinite(asked)
    return Potential(np.where(reached, asked, 0.0), np.where(reached, made, 0.0))
