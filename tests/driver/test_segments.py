"""Segments of a step: which are equal, and what they are thought to take in stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.driver.planning import answer
from autopar.driver.search import pipelining, segment_plans
from autopar.driver.search import segments as segment_sorts
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.segment_division import Divided
from autopar.driver.search.segment_plans import FreePlans
from autopar.driver.search.segment_search import SegmentSearch
from autopar.driver.search.segments import SampledStep, segments
from autopar.errors import InfeasibleError, StageError
from autopar.ir.graph import Graph, Role
from autopar.ir.own_ops import is_end
from autopar.ir.passes.microbatches import in_microbatches
from autopar.plans.memory_refinement import Beaten
from autopar.plans.pipeline_orders import make_schedule
from autopar.plans.plan import Plan
from autopar.plans.requests.policy import Policy
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import GraphRequest, make_graph_request
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.codegen.models import case
from tests.grouped import grouped
from tests.planned import hostless
from tests.zoo.cases import trained


class Chain(nn.Module):
    """Layers of these widths, one after the other, each under so many functions."""

    def __init__(self, widths: Sequence[int], functions: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.functions = functions
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            for _ in range(self.functions):
                x = x.tanh()
        return x.square().mean()


def chain(*widths: int) -> Graph:
    return trace(Chain(widths), (torch.randn(8, widths[0]),), {}).graph


def asked(graph: Graph, devices: int, **options: Any) -> GraphRequest:
    made = make_options(backend="eager", **grouped(**options))
    return make_graph_request(graph, hostless(f"{devices}xH100"), made)


def test_equal_segments_are_planned_once() -> None:
    """Embedding, layers, norm and head of Llama; blocks of a ResNet that differ are not equal."""
    sample = SampledStep(in_microbatches(case("llama").traced.graph, 2), Policy())
    assert [(s.count, s.stage) for s in sample.kinds] == [(1, 0), (2, 1), (1, 2), (1, 3)]
    assert sample.kinds[1].share == 1 / 2 and sample.busiest == 1
    resnet = SampledStep(trained("resnet").traced.graph, Policy())
    assert sum(sort.count for sort in resnet.kinds) == len(resnet.parts)
    assert len(resnet.kinds) > 3


def test_of_many_equal_segments_few_are_planned() -> None:
    sample = SampledStep(in_microbatches(chain(*[16] * 9), 2), Policy())
    sort, last = sample.kinds  # with the loss
    stage, _ = sample.stages
    assert (sort.count, sort.share) == (7, 1 / 3) and last.count == 1
    assert len({n.target for n in stage.with_role(Role.PARAM)}) == 2 * 3
    assert sample.often(0) == pytest.approx(7 / 3)
    assert sum(map(is_end, stage.nodes)) == 2  # the first of them is sent nothing


def test_of_many_sorts_some_are_planned_together() -> None:
    """And share what that takes by their work."""
    sample = SampledStep(in_microbatches(chain(*range(16, 16 + 41)), 2), Policy())
    assert len(sample.kinds) == 40 and 12 < len(sample.stages) <= 24
    for stage in range(len(sample.stages)):
        assert sum(s.share for s in sample.kinds if s.stage == stage) == pytest.approx(1)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_steps_are_thought_to_take_about_what_they_take(count: int) -> None:
    """Within a tenth on devices that compute most of the time."""
    wanted = asked(chain(*[4096] * 9), 2, stages=2, microbatches=count)
    divided = SegmentSearch(wanted, Trail(silent)).divided(make_schedule("1f1b", 2, count))
    assert divided is not None and 0 < divided.bound_ns <= divided.objective_ns
    plan = answer(wanted, silent)
    assert divided.step_ns == pytest.approx(plan.estimates.step_ns, rel=0.1)
    assert divided.starts == (plan.structure.stages[1].start,)


def test_stages_that_take_longer_than_what_is_known_are_left_out() -> None:
    wanted = asked(chain(*[256] * 9), 4, stages=2, microbatches=4)
    ways, table = SegmentSearch(wanted, Trail(silent)), make_schedule("1f1b", 2, 4)
    found = ways.divided(table)
    with pytest.raises(Beaten):
        ways.divided(table, found.step_ns // 2)
    again = ways.divided(table, found.step_ns * 3)
    assert again.step_ns == found.step_ns


def test_what_no_segments_take_less_than_is_known_of_more_microbatches() -> None:
    """And of a backward in two parts: nothing is priced to find out once more."""
    free, place = FreePlans(), ("2", 0, False)
    free.add(place, (4, False), 100, None)
    assert free.bound_ns(place, (8, False)) == free.bound_ns(place, (4, True)) == 100
    assert free.bound_ns(place, (2, False)) == free.bound_ns(("2", 1, False), (8, False)) == 0
    free.add(place, (8, True), 120, None)
    assert [free.bound_ns(place, (8, two)) for two in (False, True)] == [100, 120]


def test_other_microbatches_are_left_out_by_what_fewer_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = SegmentSearch(asked(chain(*[256] * 9), 4, stages=2), Trail(silent))
    found = ways.divided(make_schedule("1f1b", 2, 4))
    monkeypatch.setattr(segment_plans, "price", None)
    for name, count in (("1f1b", 8), ("zb-h1", 4)):
        with pytest.raises(Beaten):
            ways.divided(make_schedule(name, 2, count), found.step_ns // 3)


def test_within_less_memory_segments_take_longer() -> None:
    """What backward recomputes is known before there are stages."""
    graph = trace(Chain([64] * 9, 5), (torch.randn(1 << 16, 64),), {}).graph
    table = make_schedule("1f1b", 2, 4)

    def divided(limit: int | None) -> Divided:
        wanted = asked(graph, 2, stages=2, microbatches=4, memory_limit=limit)
        return SegmentSearch(wanted, Trail(silent)).divided(table)

    free = divided(None)
    peak = answer(asked(graph, 2, stages=2, microbatches=4), silent).estimates.memory.total
    assert divided(2 * peak) == free
    tight = divided(peak // 2)
    assert tight.objective_ns > free.objective_ns
    # No way of a segment is within that, but a stage may be.
    assert divided(peak // 1000).starts


def test_the_plan_of_fewer_in_flight_is_told_with_what_those_hold() -> None:
    """Stages are planned for a few numbers of microbatches in flight, and told with their own."""
    wanted = asked(chain(*[64] * 17), 8, stages=8, microbatches=8, schedule="1f1b")
    plan = answer(wanted, silent)
    saved = [stage.estimates.memory.saved for stage in plan.stages[1:-1]]
    assert saved == sorted(saved, reverse=True) and len({*saved}) == len(saved)


@pytest.mark.nightly
def test_stages_that_fit_are_found_where_those_thought_best_do_not() -> None:
    """More microbatches take longer here, and what a stage holds beside what its segments save is
    not known before it is planned."""
    graph = trace(Chain([32] * 7, 3), (torch.randn(1024, 32),), {}).graph

    def found(**options: Any) -> Plan:
        return answer(asked(graph, 2, stages=2, **options), silent)

    eight = found(microbatches=8)
    limit = max(stage.estimates.memory.total for stage in eight.stages) + (1 << 16)
    with pytest.raises(InfeasibleError):
        found(microbatches=4, memory_limit=limit)
    assert found(microbatches=None).structure.microbatches == 2
    plan = found(microbatches=None, memory_limit=limit)
    assert plan.structure.microbatches == 8
    assert all(stage.estimates.memory.total <= limit for stage in plan.stages)


class Irregular(nn.Module):
    """Layers, the first two before one batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if k < 2 else x.tanh()
        return x.square().mean()


def test_what_forward_changes_is_within_a_segment() -> None:
    graph = trace(Irregular(), (torch.randn(8, 16),), {}).graph
    assert [part.module for part in segments(graph)] == [
        "layers.0",
        "norm",
        *(f"layers.{k}" for k in range(2, 6)),
    ]
    plan = answer(asked(graph, 2, cuts="layers.4", microbatches=1), silent)
    assert [stage.start for stage in plan.structure.stages] == ["", "layers.4"]


def test_cuts_that_are_given_may_be_anywhere() -> None:
    """In a model that has one segment, say."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x).square().mean()

    graph = trace(One(), (torch.randn(8, 16),), {}).graph
    assert len(segments(graph)) == 1
    plan = answer(asked(graph, 2, cuts="layers.0.1", microbatches=2), silent)
    assert len(plan.structure.stages) == 2
    with pytest.raises(StageError, match="2 stages are more than the model has parts: 1"):
        answer(asked(graph, 2, stages=2, microbatches=2), silent)


def test_each_segment_makes_again_what_the_model_wraps() -> None:
    """Not what the busiest does."""

    class Wrapped(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
            return x.square().mean()

    graph = trace(Wrapped([16, 16, 16, 64, 16, 16]), (torch.randn(8, 16),), {}).graph
    plan = answer(asked(graph, 2, stages=2, microbatches=2, checkpoint="as written"), silent)
    again = [stage.recompute for stage in plan.structure.stages]
    assert all(again) and again[0] != again[1]


def test_no_more_is_held_than_there_are_microbatches() -> None:
    """Stages are planned for some numbers in flight, none of them above the largest there is."""
    graph = trace(Chain([64] * 17, 3), (torch.randn(1 << 13, 64),), {}).graph

    def found(limit: int | None) -> Plan:
        given: dict[str, Any] = {"stages": 8, "microbatches": 8, "schedule": "1f1b"}
        return answer(asked(graph, 8, **given, memory_limit=limit), silent)

    free = found(None)
    tight = found(free.estimates.memory.total)
    assert tight.structure.stages == free.structure.stages


def test_microbatches_that_are_asked_for_hold_of_one_stage_too() -> None:
    """Where their number is given and that of stages is open."""
    wanted = asked(chain(*[16] * 4), 2, stages="auto", microbatches=4)
    assert answer(wanted, silent).structure.microbatches == 4


def test_a_strategy_may_have_nothing_to_say_of_some_segments() -> None:
    """An embedding has no layer that Megatron's way would share."""
    wanted = asked(case("llama").traced.graph, 4, stages=2, microbatches=2, strategy="megatron")
    assert answer(wanted, silent).structure.is_pipeline


def test_one_stage_is_planned_where_no_other_number_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though stages were thought to fit, and to be better."""

    def nothing_fits(*_: Any) -> None:
        raise InfeasibleError("no stage fits")

    monkeypatch.setattr(pipelining, "plan_stages", nothing_fits)
    plan = answer(asked(chain(*[64] * 5), 2, stages="auto", microbatches=2), silent)
    assert not plan.structure.is_pipeline


def test_where_no_stage_can_begin_segments_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = in_microbatches(chain(*[16] * 6), 2)
    parts = segments(whole)
    cut = segment_sorts.in_stages

    def stubborn(graph: Graph, cuts: Sequence[int]) -> tuple[Graph, ...]:
        if parts[3].start in cuts:
            raise StageError("not there")
        return cut(graph, cuts)

    monkeypatch.setattr(segment_sorts, "in_stages", stubborn)
    assert SampledStep(whole, Policy()).parts == (*parts[:3], *parts[4:])

    def never(graph: Graph, cuts: Sequence[int]) -> tuple[Graph, ...]:
        raise StageError("nowhere")

    monkeypatch.setattr(segment_sorts, "in_stages", never)
    with pytest.raises(StageError, match="nowhere"):
        SampledStep(whole, Policy())
