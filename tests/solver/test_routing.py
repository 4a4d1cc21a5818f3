"""Routes do not depend on what was asked before, and no more is worked out than is asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.problem import IntArray, Problem
from autopar.solver import routing
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from autopar.solver.routing import Links, Router, links_of
from tests.solver.making import flow, problem
from tests.solver.random_problems import problems
from tests.solver.test_exact import SETTINGS


@SETTINGS
@given(problems(), st.randoms(use_true_random=False), st.booleans())
def test_answers_do_not_depend_on_the_questions_before(
    stated: Problem, random: st.Random, seconded: bool
) -> None:
    for each in stated.flows:
        states = range(len(each.states))
        asked = [(root, frozenset(random.sample(states, k))) for root in states for k in states]
        random.shuffle(asked)
        second: IntArray | None = None
        if seconded:
            second = np.array([random.randrange(4) for _ in each.costs], np.int64)
        known = Router(each, Links(each), second)
        for root, terminals in asked:
            if random.random() < 0.3:
                fresh = Router(each, Links(each), second)
                assert known.lengths(terminals) == fresh.lengths(terminals)
            fresh = Router(each, Links(each), second)
            fresh.lengths(terminals)  # goes to the end
            assert known.route(root, terminals) == fresh.route(root, terminals)


def test_a_near_state_is_found_without_looking_at_the_far_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line of a thousand states, each one nanosecond from the next."""
    arcs = [(s, s + 1, 1) for s in range(999)]
    line = flow(0, [998], [(1, [999])], arcs, 1000)
    popped: list[tuple[int, int]] = []

    def heappop(heap: list[tuple[int, int]]) -> tuple[int, int]:
        popped.append(heap[0])
        return original(heap)

    original = routing.heappop
    monkeypatch.setattr(routing, "heappop", heappop)
    router = Router(line, Links(line))
    found = router.route(998, frozenset({999}))
    assert found is not None and found.arcs == (998,)
    assert len(popped) == 2
    found = router.route(0, frozenset({999}))
    assert found is not None and found.cost == 999
    assert len(popped) == 1000


def test_flows_with_the_same_arcs_share_their_links() -> None:
    one = flow(0, [0], [(1, [1])], [(0, 1, 5), (0, 2, 5)], 3)
    dearer = replace(one, costs=one.costs * 2)
    longer = replace(one, states=(*one.states, "nowhere"))
    other = flow(0, [0], [(1, [1])], [(0, 1, 5), (2, 1, 5)], 3)
    first, second, third, fourth = links_of([one, dearer, longer, other])
    assert first is second
    assert len({first, third, fourth}) == 3
    assert len(third.into) == 4
    assert fourth.into == [[], [0, 1], []]


def test_what_sinks_ask_for_is_counted_once_per_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is used in many steps: where nothing moves, the work grows with the steps."""
    count = 60
    arcs = [(0, 1, 7), (1, 0, 7)]
    weight = flow(0, [0, 1], [(k, [0, 1]) for k in range(1, count + 1)], arcs, 2)
    stated = problem([[0, 9]] * (count + 1), flows=[weight])
    asked: list[int] = []
    prices = type(Descent(stated, Evaluator(stated), Clock(None))._prices)
    original = prices._state_of

    def counted(self: object, f: int, k: int, choice: list[int]) -> int:
        asked.append(k)
        return original(self, f, k, choice)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(prices, "_state_of", counted)
    descent = Descent(stated, Evaluator(stated), Clock(None))
    found = descent.improve([0] * (count + 1))
    assert found is not None and found[1].objective == 0
    assert len(asked) <= 3 * count


def test_a_sink_that_moves_is_no_reason_for_itself_to_stay() -> None:
    """Two of one flow: what the other asks for is there already, what only it asks for is not."""
    weight = flow(0, [0], [(1, [1, 0]), (2, [1, 2])], [(0, 1, 5), (0, 2, 5)], 3)
    stated = problem([[0], [0, 3], [0, 6]], flows=[weight])
    descent = Descent(stated, Evaluator(stated), Clock(None))
    prices = descent._prices
    assert [*prices(1, [0, 0, 0])] == [0, 3]
    prices.moved(2)
    assert [*prices(1, [0, 0, 1])] == [5, 3]
    found = [descent.improve((0, a, b)) for a in (0, 1) for b in (0, 1)]
    assert [each and each[1].objective for each in found] == [5, 5, 5, 5]
