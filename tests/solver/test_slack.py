"""Usages that matter at no time: left out, without a change of what fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from autopar.ir.problem import Problem, Usage
from autopar.solver import evaluate
from autopar.solver.message_passing.path import without_slack

from .random_problems import chained_problems
from .test_message_passing import ladder


@settings(max_examples=50, deadline=None)
@given(chained_problems())
def test_the_same_plans_fit(problem: Problem) -> None:
    fewer = without_slack(problem)
    for choice in itertools.product(*(range(len(costs)) for costs in problem.costs)):
        there, here = evaluate(problem, choice), evaluate(fewer, choice)
        assert there.feasible == here.feasible
        assert there.objective == here.objective


def test_only_what_no_plan_overfills_is_left_out() -> None:
    """Three live nodes of up to 9 fill 27, the first two times and the last hold fewer; the fourth
    node has a usage of its own at the end."""
    problem = ladder(4, 3, 0, limit=26)
    assert without_slack(problem).usages == problem.usages
    assert not any(without_slack(ladder(4, 3, 0, limit=27)).usages)
    alone = Usage(100, 101, np.array([26, 1, 1]))
    usages = (*problem.usages[:3], (*problem.usages[3], alone))
    left = without_slack(replace(problem, usages=usages))
    assert left.usages == problem.usages


def test_sums_beyond_64_bits() -> None:
    large = Usage(0, 9, np.array([2**60, 2**59, 1]))
    problem = replace(ladder(12, 3, 0, limit=2**60), usages=((large,),) * 12)
    assert without_slack(problem).usages == problem.usages
