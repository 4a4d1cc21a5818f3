"""What is known of plans in stages beside what they are: the margin, other shardings, what more
memory or faster links would buy, and what steps take within less memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer, best_of_all
from autopar.driver.search.finding import Finding, StageInStep
from autopar.driver.search.incumbent import Trail
from autopar.errors import PlanError
from autopar.ir.problem import Status
from autopar.plans.plan import Plan
from autopar.plans.requests.policy import other_thresholds
from autopar.plans.requests.request import GraphRequest
from autopar.report.html.page import html
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.driver.test_segments import Chain, asked
from tests.driver.test_stages_if_needed import joined_by
from tests.grouped import grouped

SLOW = joined_by(4e8, 4)


@cache
def model() -> tuple[Chain, torch.Tensor]:
    with torch.device("meta"):
        return Chain([2048] * 9), torch.zeros(1024, 2048)


def wanted(**options: Any) -> GraphRequest:
    built, x = model()
    found = asked(trace(built, (x,)).graph, 4, **options)
    return replace(found, cluster=SLOW)


@cache
def in_two() -> Finding:
    return best_of_all(wanted(stages=2, microbatches=4), Trail(silent))


@cache
def planned() -> Plan:
    built, x = model()
    return autopar.plan(built, (x,), cluster=SLOW, **grouped(stages=2, microbatches=4))


def explained(name: str, **how: Any) -> Any:
    built, x = model()
    return planned().explain(name, model=built, inputs=(x,), cluster=SLOW, **how)


@pytest.mark.parametrize("options", [{"stages": 2, "microbatches": 4}, {"stages": "auto"}], ids=str)
def test_the_margin_of_stages_is_said(options: Mapping[str, Any]) -> None:
    plan = answer(wanted(**options, margin=True), silent)
    plain = answer(wanted(**options), silent)
    assert plan.structure == plain.structure and plain.provenance.margin is None
    margin = plan.provenance.margin
    assert margin is not None and margin.step_ns is not None
    assert margin.bound_ns <= margin.step_ns
    assert "stage" in margin.rival
    assert margin.rival in plan.explain().margin and margin.rival in plan.summary().margin
    assert "How far the next plan is" in str(plan.explain())
    assert b"Margin" in html(plan)


def test_a_rival_of_a_stage_is_what_the_step_takes_with_it() -> None:
    """What the others do stays, and the step is simulated again."""
    step = in_two()
    for number, stage in enumerate(step.stages):
        place = StageInStep(step, number)
        own_ns = stage.solution.objective
        assert place.step_ns(own_ns) == step.objective_ns
        assert place.step_ns(2 * own_ns) > place.step_ns(own_ns) > place.step_ns(own_ns // 2)
        # The problem of all choices has those of the plan, at what they cost.
        assert set(place.best.problem.keys) == set(stage.problem.keys)
        pairs = zip(place.best.problem.costs, place.best.solution.choice, strict=True)
        known = zip(stage.problem.costs, stage.solution.choice, strict=True)
        assert sum(int(c[k]) for c, k in pairs) == sum(int(c[k]) for c, k in known)
        narrow, wide = (sum(map(len, p.costs)) for p in (stage.problem, place.best.problem))
        assert narrow <= wide


def test_other_shardings_of_a_stage_are_told_as_steps() -> None:
    found = explained("layers.6.weight")
    (tensor,) = found.alternatives
    assert tensor.subject.startswith("stage 1: layers.") and tensor.subject.endswith("is stored")
    assert tensor.modelled_ns == planned().estimates.step_ns
    known = [each for each in tensor.alternatives if each.status is not Status.INFEASIBLE]
    assert len(known) >= 2 and sum(each.is_chosen for each in known) == 1
    whole = {each.sharding: each.modelled_ns for each in known}["[R]"]
    assert whole is not None and whole > 1.05 * tensor.modelled_ns


def test_what_more_would_buy_is_planned_again_on_the_same_stages() -> None:
    memory, link = explained("layers.6.weight").benefits
    assert memory.before_ns == memory.modelled_ns == planned().estimates.step_ns
    assert link.change == "2 times made up"
    twice = replace(SLOW.levels[0].link, bytes_per_s=2 * SLOW.levels[0].link.bytes_per_s)
    faster = replace(SLOW, levels=(replace(SLOW.levels[0], link=twice),))
    built, x = model()
    cuts = tuple(stage.start for stage in planned().structure.stages[1:])
    with other_thresholds(estimate_slack=0.0):
        there = autopar.plan(
            built, (x,), cluster=faster, mesh=planned().structure.mesh_text,
            **grouped(cuts=cuts, microbatches=4, schedule=planned().structure.schedule),
        )  # fmt: skip
    assert link.modelled_ns == there.estimates.step_ns < link.before_ns


def test_what_several_stages_have_is_looked_at_in_the_one_that_is_named() -> None:
    with pytest.raises(PlanError, match=r"say which"):
        explained("layers.*.weight")
    found = explained("layers.*.weight", stage=0)
    assert found.alternatives[0].subject.startswith("stage 0: ")


@pytest.mark.nightly
def test_steps_in_stages_rise_as_limits_fall() -> None:
    built, x = model()
    cluster = parse_cluster("4xL4")
    found = autopar.frontier(
        built, (x,), cluster=cluster, microbatches=4,
        **grouped(stages=2, margin=True),
    )  # fmt: skip
    plans = [point.plan for point in found.points]
    assert len(plans) > 1 and all(plan is not None for plan in plans)
    steps = [plan.estimates.step_ns for plan in plans if plan]
    assert steps == sorted(steps) and steps[0] == found.unlimited.estimates.step_ns
    for point in found.points:
        assert point.plan is not None
        assert point.plan.structure.is_pipeline
        assert point.plan.estimates.memory.total <= point.limit_bytes
        assert point.plan.estimates.memory_limit == point.limit_bytes
        assert point.plan.provenance.margin is not None
    assert plans[-1] is not None
    assert plans[-1].estimates.memory.total == found.smallest_peak_bytes
    assert "fits into" in str(found)


def test_limits_of_stages_that_are_given() -> None:
    built, x = model()
    peak = planned().estimates.memory.total
    limits = (peak, peak * 9 // 10, 1 << 20)
    found = autopar.frontier(
        built, (x,), limits=limits, cluster=SLOW, **grouped(stages=2), microbatches=4
    )
    first, less, none = (point.plan for point in found.points)
    assert first is not None and first.structure == planned().structure
    assert none is None
    if less is not None:
        assert less.estimates.step_ns >= first.estimates.step_ns
