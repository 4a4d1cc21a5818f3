"""What a choice costs, on cases worked out by hand."""

from __future__ import annotations

import pytest

from autopar.ir.problem import FORBIDDEN
from autopar.solver import evaluate
from autopar.solver.routing import MAX_EXACT_TERMINALS
from tests.solver.making import edge, flow, problem


def test_nodes_and_edges_add_up() -> None:
    parallel = [edge(0, 1, [[1, 2], [3, 4]]), edge(1, 0, [[10, 20], [30, 40]])]
    found = evaluate(problem([[100, 200], [1000, 2000]], edges=parallel), (1, 0))
    assert found.objective == 200 + 1000 + 3 + 20
    assert found.feasible


def test_a_shared_arc_is_charged_once() -> None:
    shared = flow(0, [0], [(1, [2]), (2, [3])], [(0, 1, 10), (1, 2, 1), (1, 3, 2), (0, 3, 12)], 4)
    found = evaluate(problem([[0], [0], [0]], flows=[shared]), (0, 0, 0))
    assert found.objective == 13
    assert found.arcs == ((0, 1, 2),)


def test_a_detour_pays_where_it_is_shared() -> None:
    arcs = [(0, 1, 5), (0, 2, 5), (0, 3, 6), (3, 1, 1), (3, 2, 1)]
    one = flow(0, [0], [(1, [1])], arcs, 4)
    two = flow(0, [0], [(1, [1]), (2, [2])], arcs, 4)
    nodes = [[0], [0], [0]]
    assert evaluate(problem(nodes, flows=[one]), (0, 0, 0)).arcs == ((0,),)
    found = evaluate(problem(nodes, flows=[two]), (0, 0, 0))
    assert found.objective == 8
    assert found.arcs == ((2, 3, 4),)


def test_fewest_arcs_then_smallest_index_among_equals() -> None:
    arcs = [(0, 1, 0), (1, 2, 0), (0, 2, 0), (0, 2, 0)]
    found = evaluate(problem([[0], [0]], flows=[flow(0, [0], [(1, [2])], arcs, 3)]), (0, 0))
    assert found.arcs == ((2,),)


def test_what_nobody_asks_for_costs_nothing() -> None:
    idle = flow(0, [0], [(1, [-1])], [(0, 1, 9)], 2)
    assert evaluate(problem([[0], [0]], flows=[idle]), (0, 0)).objective == 0


@pytest.mark.parametrize(
    ("made", "arcs"), [([0], []), ([0], [(0, 1, FORBIDDEN)]), ([-1], [(0, 1, 9)])]
)
def test_an_unreachable_state_is_a_violation(made: list[int], arcs: list[tuple[int, int, int]]):
    found = evaluate(problem([[0], [0]], flows=[flow(0, made, [(1, [1])], arcs, 2)]), (0, 0))
    assert not found.feasible
    assert "cannot reach" in found.violation


def test_forbidden_choices_and_pairs_are_violations() -> None:
    pair = edge(0, 1, [[0, FORBIDDEN]])
    stated = problem([[0], [0, 0, FORBIDDEN]], edges=[edge(0, 1, [[0, FORBIDDEN, 0]])])
    assert evaluate(stated, (0, 0)).feasible
    assert "pair" in evaluate(stated, (0, 1)).violation
    assert "forbidden choice" in evaluate(stated, (0, 2)).violation
    assert pair.cost.shape == (1, 2)


def test_memory_at_every_time() -> None:
    spans = [(0, 2), (2, 4), (3, 3), (1, 3)]
    stated = problem([[0]] * 4, usages=[[5], [6], [100], [1]], intervals=spans, limit=7)
    found = evaluate(stated, (0, 0, 0, 0))
    assert (found.peak, found.peak_time, found.feasible) == (7, 2, True)


def test_the_first_of_the_worst_times_is_named() -> None:
    stated = problem([[0]] * 2, usages=[[8], [8]], intervals=[(5, 6), (1, 2)], limit=7)
    found = evaluate(stated, (0, 0))
    assert (found.peak, found.peak_time) == (8, 1)
    assert found.violation == "8 in use at time 1, the limit is 7"


def test_sums_beyond_64_bits() -> None:
    large = FORBIDDEN - 1
    assert evaluate(problem([[large]] * 20), (0,) * 20).objective == 20 * large


def test_many_terminals_give_an_upper_bound_and_say_so() -> None:
    count = MAX_EXACT_TERMINALS + 1
    arcs = [(0, 1 + t, 10) for t in range(count)] + [(0, count + 1, 5)]
    arcs += [(count + 1, 1 + t, 6) for t in range(count)]
    spread = flow(0, [0], [(1 + t, [1 + t]) for t in range(count)], arcs, count + 2)
    found = evaluate(problem([[0]] * (count + 1), flows=[spread]), (0,) * (count + 1))
    assert not found.exact
    assert found.feasible
    assert 5 + 6 * count <= found.objective <= 10 * count


def test_a_choice_is_one_index_per_node() -> None:
    with pytest.raises(ValueError, match="1 choices for 2 nodes"):
        evaluate(problem([[0], [0]]), (0,))
    with pytest.raises(ValueError, match="node1 has no choice 1"):
        evaluate(problem([[0], [0]]), (0, 1))
