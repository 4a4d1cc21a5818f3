"""Tables without equal rows and columns: what comes of them is what comes of the whole ones, to the
bit."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.ir.problem import FORBIDDEN, Edge
from autopar.solver.column_generation.relays import relay
from autopar.solver.pairwise import core as lean
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.kernels import rows_least, sweep
from tests.solver.making import problem

SIZES, STATES = (40, 30, 36), 9


def ring(seed: int) -> Core:
    """Three nodes, each pair of which has costs: by states, of which there are fewer than choices
    and some pairs are forbidden; but for one pair, by choices."""
    draw = np.random.default_rng(seed)
    state = [draw.integers(0, STATES, size) for size in SIZES]
    edges: list[Edge] = []
    for a, b in ((0, 1), (1, 2), (0, 2)):
        costs = draw.integers(0, 1_000, (STATES, STATES))
        costs[draw.random(costs.shape) < 0.2] = FORBIDDEN
        by_choices = draw.integers(0, 1_000, (SIZES[a], SIZES[b]))
        by_states = costs[np.ix_(state[a], state[b])]
        edges.append(Edge(a, b, by_states if (a, b) != (0, 2) else by_choices))
    relayed = relay(problem([draw.integers(0, 99, n) for n in SIZES], edges=edges), (), ())
    assert relayed is not None
    return relayed.core


def whole(core: Core) -> Core:
    """The same, with no table made lean."""
    return core._replace(lean_table=np.full_like(core.lean_table, -1))


@pytest.mark.parametrize("seed", range(4))
def test_the_least_of_rows_is_that_of_the_whole_table(seed: int) -> None:
    core = ring(seed)
    assert (core.lean_table >= 0).tolist() == [True, False, True]  # (0, 1), (0, 2), (1, 2)
    assert len(core.lean_pool) <= 2 * STATES**2
    message = np.random.default_rng(seed).uniform(-500, 500, len(core.lean_place))
    for edge in range(3):
        for is_target in (False, True):
            size = SIZES[core.target[edge] if is_target else core.source[edge]]
            some, all_of_them = np.empty(size), np.empty(size)
            rows_least(core, edge, is_target, message, some)
            rows_least(whole(core), edge, is_target, message, all_of_them)
            assert some.tolist() == all_of_them.tolist()


def test_sweeps_come_to_the_same_messages_bounds_and_plans() -> None:
    found: list[object] = []
    for core in (ring(7), whole(ring(7))):
        message, plan = np.zeros(len(core.lean_place)), np.zeros(3, dtype=np.int64)
        order, free, margin = np.arange(3), np.ones(3, dtype=np.bool_), np.zeros(3)
        theta = core.cost.astype(np.float64)
        bounds = [
            sweep(core, upward, order, free, theta, message, plan, margin)
            for upward in (True, False, True, False)
        ]
        found.append((bounds, message.tolist(), plan.tolist(), margin.tolist()))
    assert found[0] == found[1]


def test_rows_that_come_to_the_same_sum_by_chance_are_not_taken_for_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lean, "_ODD", np.int64(0))
    assert (ring(1).lean_table == -1).all()
