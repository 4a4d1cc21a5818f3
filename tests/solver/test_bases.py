"""A relaxation that starts where another ended, of a problem that differs in little."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.problem import Basis, Problem
from autopar.solver import solve
from autopar.solver.adapter import Answer, Highs, Outcome
from autopar.solver.driver import in_canonical_order
from autopar.solver.evaluate import peak_usage
from autopar.solver.ilp import Model, build_model
from autopar.solver.relaxation import as_basis, as_start, express
from tests.solver.random_problems import problems
from tests.solver.synthetic import transformer
from tests.solver.test_exact import FEW, SETTINGS

ANY_START = given(problems(), problems(), st.integers(0, 40))
"""That of the same problem within another limit, or of any other."""


@FEW
@ANY_START
def test_answers_do_not_depend_on_the_start(problem: Problem, other: Problem, limit: int) -> None:
    check_start(problem, other, limit)


@pytest.mark.nightly
@SETTINGS
@ANY_START
def test_no_answer_depends_on_the_start(problem: Problem, other: Problem, limit: int) -> None:
    check_start(problem, other, limit)


def check_start(problem: Problem, other: Problem, limit: int) -> None:
    expected = solve(problem)
    for known in (replace(problem, usage_limit=limit), replace(problem, usage_limit=None), other):
        found = solve(problem, start=solve(known).basis)
        assert found.status is expected.status
        assert found.objective == expected.objective
        assert found.choice == expected.choice


@pytest.mark.nightly
def test_another_limit_takes_few_steps() -> None:
    free = transformer(1, (2, 4))
    peak, _ = peak_usage(free, solve(free).choice)
    _, basis = _relaxed(_stated(free))
    tight = _stated(replace(free, usage_limit=peak * 9 // 10))
    few = tight.num_rows // 20
    assert len(tight.limits) == 1
    assert _relaxed(tight, most=few)[0].outcome is Outcome.LIMIT
    cold, warm = _relaxed(tight)[0], _relaxed(tight, basis, most=few)[0]
    assert warm.outcome is cold.outcome is Outcome.OPTIMAL
    assert abs(warm.objective - cold.objective) <= 1e-6 * abs(cold.objective)


def test_a_node_more_takes_few_steps() -> None:
    """Though it comes before all others, and has them numbered anew."""
    less = transformer(1, (2, 4))
    more = replace(
        less,
        keys=("0", *less.keys),
        labels=(("one", "other"), *less.labels),
        costs=(np.array([3, 5]), *less.costs),
        usages=((), *less.usages),
        flows=tuple(
            replace(
                flow,
                source=flow.source + 1,
                sinks=tuple(replace(sink, node=sink.node + 1) for sink in flow.sinks),
            )
            for flow in less.flows
        ),
    )
    assert not (less.edges or less.windows)
    _, basis = _relaxed(_stated(less))
    model = _stated(more)
    few = model.num_rows // 20
    assert _relaxed(model, most=few)[0].outcome is Outcome.LIMIT
    assert _relaxed(model, basis, most=few)[0].outcome is Outcome.OPTIMAL


@pytest.mark.nightly
def test_memory_is_limiting_where_more_of_it_is_worth_something() -> None:
    free = transformer(1, (2, 4))
    found = solve(free)
    peak, _ = peak_usage(free, found.choice)
    assert not found.is_limiting
    assert not solve(replace(free, usage_limit=peak)).is_limiting
    within = [solve(replace(free, usage_limit=peak * k // 20)) for k in (19, 18, 17, 16)]
    assert not within[0].is_limiting
    paid = [tight for tight in within if tight.objective > found.objective]
    assert paid and all(tight.is_limiting for tight in paid)


def _stated(problem: Problem) -> Model:
    return build_model(in_canonical_order(problem)[0])


def _relaxed(
    model: Model, basis: Basis | None = None, most: int | None = None
) -> tuple[Answer, Basis]:
    highs = Highs({} if most is None else {"simplex_iteration_limit": most})
    answer = highs.relax(express(model), start=as_start(model, basis) if basis else None)
    return answer, as_basis(model, highs.basis())
