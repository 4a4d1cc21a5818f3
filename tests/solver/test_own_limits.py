"""A time with a limit of its own is as one whose nodes take what is missing of the usual limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.problem import Problem, Status, Usage
from autopar.solver import evaluate, solve
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from autopar.solver.pairwise.contract import contract
from autopar.solver.pairwise.core import lay_out
from autopar.solver.search import Clock
from tests.solver.bruteforce import solve_by_enumeration
from tests.solver.making import problem
from tests.solver.random_problems import problems


def with_row(stated: Problem, rows: list[list[int]], limit: int, own: int) -> tuple[Problem, ...]:
    """With a time more, that has its own limit, and with that shifted to the usual one."""
    after = 1 + max((u.stop for usages in stated.usages for u in usages), default=0)

    def added(shift: int) -> Problem:
        usages = tuple(
            (*usages, Usage(after, after + 1, np.array(row, np.int64) + shift * (node == 0)))
            for node, (usages, row) in enumerate(zip(stated.usages, rows, strict=True))
        )
        return replace(stated, usages=usages, usage_limit=limit)

    return replace(added(0), other_limits={after: own}), added(limit - own)


@settings(max_examples=60)
@given(stated=problems(), data=st.data())
def test_as_if_what_is_missing_were_in_use(stated: Problem, data: st.DataObject) -> None:
    amounts = st.integers(0, 20)
    counts = map(len, stated.costs)
    rows = [data.draw(st.lists(amounts, min_size=n, max_size=n)) for n in counts]
    limit = 50 if stated.usage_limit is None else stated.usage_limit
    limited, shifted = with_row(stated, rows, limit, data.draw(st.integers(0, 60)))
    best, found = solve_by_enumeration(shifted), solve(limited)
    if best.objective is None:
        assert found.status is Status.INFEASIBLE
        conflict = found.conflict
        assert conflict is None or conflict.limit == limited.limit_at(conflict.time)
    else:
        assert found.objective == best.objective and evaluate(limited, found.choice).feasible
    descended = Descent(limited, Evaluator(limited), Clock(None)).improve(
        tuple(0 for _ in limited.keys)
    )
    assert descended is None or evaluate(shifted, descended[0]).feasible


@pytest.mark.parametrize("own", [3, 7, 30])
def test_in_arrays_too(own: int) -> None:
    stated = problem([[0, 1], [0, 1]], usages=[[5, 2], [6, 1]], limit=10)
    cores = [lay_out(each, contract(each)) for each in with_row(stated, [[4, 0], [2, 1]], 10, own)]
    assert cores[0].base.tolist() == cores[1].base.tolist()


def test_the_time_that_breaks_its_own_limit_is_named() -> None:
    stated = problem([[0]], usages=[[9]], limit=10)
    limited, _ = with_row(stated, [[5]], 10, 4)
    found = evaluate(limited, (0,))
    assert found.violation == "5 in use at time 2, the limit is 4"
