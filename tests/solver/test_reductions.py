"""Reductions against the oracle: the same lowest cost, and lifted plans that cost what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.problem import FORBIDDEN, Edge, IntArray, Problem
from autopar.solver import evaluate
from autopar.solver.reductions.blocks import exact_blocks, tie_blocks
from autopar.solver.reductions.components import split_components
from autopar.solver.reductions.dominated import drop_dominated
from autopar.solver.reductions.edges import merge_edges
from autopar.solver.reductions.shrink import eliminate_low_degree, inline_chains

from .bruteforce import solve_by_enumeration
from .random_problems import chained_problems, problems

Lift = Callable[[tuple[int, ...]], tuple[int, ...]]
SETTINGS = settings(max_examples=150, deadline=None)


def check(problem: Problem, reduced: Problem, lift: Lift, *, exact: bool = True) -> None:
    """Every plan of `reduced` lifts to one of the same cost; the cheapest is the cheapest."""
    best, least = solve_by_enumeration(problem), solve_by_enumeration(reduced)
    if exact:
        assert least.objective == best.objective
    elif least.objective is not None:
        assert best.objective is not None
        assert least.objective >= best.objective
    for choice in least.choices:
        there = evaluate(problem, lift(choice))
        assert there.feasible, there.violation
        assert there.objective == least.objective


@pytest.mark.parametrize(
    "reduction", [merge_edges, drop_dominated, inline_chains, eliminate_low_degree]
)
def test_exact(reduction: Callable[[Problem], tuple[Problem, Lift]]) -> None:
    @SETTINGS
    @given(problems() | chained_problems())
    def holds(problem: Problem) -> None:
        check(problem, *reduction(problem))

    holds()


@SETTINGS
@given(chained_problems())
def test_one_after_the_other(problem: Problem) -> None:
    inlined, lift_inlined = inline_chains(problem)
    smaller, lift = eliminate_low_degree(inlined)
    check(problem, smaller, lambda choice: lift_inlined(lift(choice)))


def test_a_chain_of_unary_ops_is_one_node() -> None:
    same = np.array([[0, 9], [9, 0]])
    only = np.where(same > 0, FORBIDDEN, 3)
    problem = chain(4, [only] * 3)
    smaller, lift = inline_chains(problem)
    assert len(smaller.keys) == 1
    assert lift((1,)) == (1, 1, 1, 1)
    assert smaller.costs[0].tolist() == [9, 13]
    eliminated, _ = eliminate_low_degree(chain(4, [same] * 3))
    assert len(eliminated.keys) == 1


def test_memory_is_kept() -> None:
    """Nodes that take memory in intervals of their own are not eliminated."""
    problem = replace(chain(3, [np.array([[0, 9], [9, 0]])] * 2), usage_limit=3)
    assert len(eliminate_low_degree(problem)[0].keys) == 3
    assert len(inline_chains(problem)[0].keys) == 3


@SETTINGS
@given(problems())
def test_components(problem: Problem) -> None:
    parts, join = split_components(problem)
    assert sum(len(part.keys) for part in parts) == len(problem.keys)
    best = solve_by_enumeration(problem)
    of_parts = [solve_by_enumeration(part) for part in parts]
    costs = [part.objective for part in of_parts]
    if best.objective is None:
        assert None in costs
        return
    assert sum(cost for cost in costs if cost is not None) == best.objective
    evaluation = evaluate(problem, join([part.choices[0] for part in of_parts]))
    assert evaluation.feasible
    assert evaluation.objective == best.objective


@SETTINGS
@given(chained_problems(max_nodes=2), st.booleans())
def test_tied_copies(problem: Problem, apart: bool) -> None:
    """Two copies of a problem: a restriction as a whole, exact for the components that allow it."""
    twice = copies(problem, apart=apart)
    size = len(problem.keys)
    check(twice, *tie_blocks(twice, [range(size), range(size, 2 * size)]), exact=False)
    found = exact_blocks(twice)
    for blocks in found:
        check(twice, *tie_blocks(twice, blocks))
    assert found or problem.usage_limit is not None


def test_tying_can_cost() -> None:
    """Room for one large choice: tied blocks must both take the small one."""
    one = replace(chain(1, []), usage_limit=3, intervals=((0, 1),))
    one = replace(one, costs=(np.array([5, 0]),), usages=(np.array([1, 2]),))
    twice = copies(one, apart=False)
    tied, lift = tie_blocks(twice, [(0,), (1,)])
    assert solve_by_enumeration(twice).objective == 5
    assert solve_by_enumeration(tied).objective == 10
    assert lift(solve_by_enumeration(tied).choices[0]) == (0, 0)
    assert exact_blocks(twice) == []


def test_blocks_that_differ_are_an_error() -> None:
    problem = chain(3, [np.zeros((2, 2), dtype=np.int64)] * 2)
    with pytest.raises(SolverError, match="1 and 2 nodes"):
        tie_blocks(problem, [(0,), (1, 2)])
    other = replace(problem, labels=(("a", "b"), ("a", "b"), ("a", "c")))
    with pytest.raises(SolverError, match="different choices"):
        tie_blocks(other, [(0,), (2,)])


def chain(count: int, tables: list[IntArray]) -> Problem:
    return Problem(
        name="chain",
        keys=tuple(f"n{i}" for i in range(count)),
        labels=(("a", "b"),) * count,
        costs=(np.array([0, 1]),) * count,
        usages=(np.array([1, 2]),) * count,
        intervals=tuple((i, i + 2) for i in range(count)),
        edges=tuple(Edge(i, i + 1, table) for i, table in enumerate(tables)),
    )


def copies(problem: Problem, *, apart: bool) -> Problem:
    size = len(problem.keys)
    later = 100 if apart else 0
    return replace(
        problem,
        keys=(*problem.keys, *(f"{key}'" for key in problem.keys)),
        labels=problem.labels * 2,
        costs=problem.costs * 2,
        usages=problem.usages * 2,
        intervals=(*problem.intervals, *((a + later, b + later) for a, b in problem.intervals)),
        edges=(
            *problem.edges,
            *(replace(e, source=e.source + size, target=e.target + size) for e in problem.edges),
        ),
    )
