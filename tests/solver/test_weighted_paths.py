"""What fastest ways cost by other figures: against every way there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import FORBIDDEN, Flow, Problem, Saving, Window
from autopar.solver import evaluate
from autopar.solver.clock import Clock
from autopar.solver.column_generation import relays
from autopar.solver.column_generation.passing import Passing, unpriced
from autopar.solver.column_generation.relays import distances_weighed, no_potentials, relay
from autopar.solver.routing import all_distances, shortest_distances
from autopar.solver.windows import normalised, weighed

from .bruteforce import solve_by_enumeration
from .making import flow, problem
from .random_problems import windowed_problems

STATES = 4

ARCS = st.lists(
    st.tuples(
        st.integers(0, STATES - 1),
        st.integers(0, STATES - 1),
        st.sampled_from([0, 1, 2, 3, FORBIDDEN]),
        st.integers(0, 3),
    ),
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(ARCS)
def test_of_all_fastest_ways_the_cheapest_counts(arcs: list[tuple[int, int, int, int]]) -> None:
    given_arcs = flow(0, [0], [], [(tail, head, cost) for tail, head, cost, _ in arcs], STATES)
    other_costs = [FORBIDDEN if cost >= FORBIDDEN else other for _, _, cost, other in arcs]
    other = replace(given_arcs, costs=np.array(other_costs, np.int64))
    (found,) = distances_weighed([given_arcs], [other])
    for start in range(STATES):
        for end in range(STATES):
            ways = list(_ways(given_arcs, other, start, end))
            assert found[start, end] == (min(ways)[1] if ways else FORBIDDEN)


@settings(max_examples=300, deadline=None)
@given(ARCS)
def test_the_compiled_search_for_ways_says_what_numpy_says(
    arcs: list[tuple[int, int, int, int]],
) -> None:
    of_arcs = [np.array([arc[k] for arc in arcs], np.int64) for k in range(3)]
    found = relays._shortest_distances(STATES, *of_arcs)
    assert found.tolist() == shortest_distances(STATES, *of_arcs).tolist()


def _ways(given_arcs: Flow, other: Flow, start: int, end: int) -> list[tuple[int, int]]:
    """What each way costs by either figures, of those that come by no state twice."""
    if start == end:
        return [(0, 0)]
    between = [state for state in range(STATES) if state not in (start, end)]
    found: list[tuple[int, int]] = []
    for count in range(len(between) + 1):
        for middle in permutations(between, count):
            stops = [start, *middle, end]
            hops = list(pairwise(stops))
            best = [_hop(given_arcs, other, *hop) for hop in hops]
            if all(best):
                found.append((sum(min(b)[0] for b in best), sum(min(b)[1] for b in best)))
    return found


def _hop(given_arcs: Flow, other: Flow, tail: int, head: int) -> list[tuple[int, int]]:
    there = (given_arcs.tails == tail) & (given_arcs.heads == head)
    pairs = zip(given_arcs.costs[there].tolist(), other.costs[there].tolist(), strict=True)
    return [(cost, weight) for cost, weight in pairs if cost < FORBIDDEN]


def test_no_bound_is_of_slow_ways_that_are_hidden() -> None:
    """State 2 is 5 away, or 6 by state 1, all of which is hidden: tensors take the fast way."""
    way = flow(0, [0], [(1, [2])], [(0, 2, 5), (0, 1, 3), (1, 2, 3)], 3)
    stated = problem([[0], [0]], flows=[way])
    hidden = Saving("link", {0: np.array([0])}, {0: np.array([0, 3, 3])})
    ample = Saving("device", {0: np.array([9])}, {})
    stated = replace(stated, windows=(Window("block", (hidden, ample)),))
    summed = weighed(stated, (np.array([1.0, 0.0]),))
    bounds: list[int] = []
    for distances in (all_distances(summed.flows), distances_weighed(stated.flows, summed.flows)):
        relayed = relay(summed, distances, no_potentials(summed))
        assert relayed is not None
        bounds.append(Passing(relayed, unpriced(summed)).sweep(Clock(None), 100))
    assert bounds == [0, 5]
    assert evaluate(stated, (0, 0)).objective == 5


@settings(max_examples=200, deadline=None)
@given(windowed_problems(), st.integers(0, 2**32 - 1))
def test_any_shares_bound_every_choice(stated: Problem, seed: int) -> None:
    draw = np.random.default_rng(seed)
    shares = normalised([draw.uniform(0, 1, len(window.savings)) for window in stated.windows])
    summed = weighed(stated, shares)
    distances = distances_weighed(stated.flows, summed.flows)
    relayed = relay(summed, distances, no_potentials(summed))
    best = solve_by_enumeration(stated)
    if relayed is None or best.objective is None:
        assert best.objective is None
        return
    passing = Passing(relayed, unpriced(summed))
    bound, at_least = passing.sweep(Clock(None), 100), passing.at_least()
    assert bound <= best.objective
    for choice in best.choices:
        for node, c in enumerate(choice):
            assert at_least[node][c] <= best.objective * (1 + 1e-9) + 1e-6
