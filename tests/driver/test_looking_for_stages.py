"""Where stages are looked for: lines with gaps, starts that cannot be, thoughts that are off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer, best_of_all
from autopar.driver.search import pipelining, segment_plans
from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import CandidateSearch, Trail
from autopar.driver.search.narrower import findings
from autopar.driver.search.pipeline_candidates import PipelineCandidates
from autopar.driver.search.pipeline_shapes import (
    PipelineShape,
    PipelineShapes,
)
from autopar.driver.search.pipelining import search_stages
from autopar.driver.search.segment_division import Divided
from autopar.driver.search.segment_plans import SegmentPlans
from autopar.driver.search.segment_search import SegmentSearch
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.memory_refinement import Beaten
from autopar.plans.pipeline_orders import make_schedule
from autopar.plans.plan import Plan
from autopar.plans.requests.request import GraphRequest
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.driver.test_segments import Chain, asked, chain
from tests.redone import repriced


def opened(graph: Any, devices: int, **options: Any) -> Plan:
    wanted = {"stages": "auto", "microbatches": "auto", **options}
    return answer(asked(graph, devices, **wanted), silent)


def in_one(graph: Any, devices: int, **options: Any) -> Plan:
    return answer(asked(graph, devices, microbatches="auto", **options), silent)


@pytest.mark.parametrize(("layers", "devices"), [(4, 1), (2, 7), (1, 2)])
def test_where_no_number_of_stages_is_possible_there_is_one(layers: int, devices: int) -> None:
    assert not opened(chain(*[64] * (layers + 1)), devices).structure.is_pipeline


@pytest.mark.parametrize(("strategy", "stages"), [("fsdp", "auto"), ("ddp", 2)])
def test_where_a_microbatch_is_too_small_for_a_strategy_there_are_fewer(
    strategy: str, stages: int | str
) -> None:
    """Four for each of two ranks are all of a batch of eight."""
    plan = opened(chain(*[64] * 9), 4, strategy=strategy, stages=stages)
    assert plan.structure.microbatches < 8


def test_numbers_of_microbatches_that_have_no_order_are_left_out() -> None:
    """Interleaved on three ranks: 16 are not divided by five rounds."""
    graph = trace(Chain([64] * 13), (torch.randn(16, 64),), {}).graph
    wanted = asked(graph, 3, stages=6, microbatches="auto", schedule="interleaved")
    assert 16 not in PipelineShapes(wanted).numbers_of_microbatches(3)
    assert answer(wanted, silent).structure.microbatches == 4


def test_numbers_of_ranks_that_share_nodes_unevenly_are_left_out() -> None:
    """Three of six devices are no part of nodes of two."""
    graph = trace(Chain([64] * 13), (torch.randn(16, 64),), {}).graph
    cluster = parse_cluster("3x2xH100")
    wanted = replace(asked(graph, 6, stages="auto", microbatches="auto"), cluster=cluster)
    assert PipelineShapes(wanted).numbers_of_ranks() == [3, 6]


@pytest.mark.nightly
def test_one_stage_is_planned_where_plans_take_far_longer_than_thought() -> None:
    """Stages that were thought to fit do not, and those that do are slow."""
    graph = trace(Chain([32] * 7, 3), (torch.randn(1024, 32),), {}).graph
    peak = opened(graph, 2).estimates.memory.total
    tight = {"memory_limit": int(0.3 * peak)}
    found, plain = opened(graph, 2, **tight), in_one(graph, 2, **tight)
    assert found.estimates.step_ns <= plain.estimates.step_ns


class Summed(Chain):
    """A chain, and a sum over a table that no microbatch shares."""

    def __init__(self, rows: int) -> None:
        super().__init__([32] * 8, 3)
        self.table = nn.Linear(32, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh().tanh().tanh()
        return (x + self.table.weight.sum(0)).square().mean()


@pytest.mark.nightly
def test_one_stage_is_planned_in_any_number_of_microbatches() -> None:
    """Segments are thought to hold more than the whole does."""
    graph = trace(Summed(8_000), (torch.randn(1024, 32),), {}).graph
    tight = {"memory_limit": 8_000 * 32 * 8 + (1_300 << 10)}
    found, plain = opened(graph, 2, **tight), in_one(graph, 2, **tight)
    assert found.estimates.step_ns <= plain.estimates.step_ns


def test_once_one_stage_is_planned_pipelines_that_take_longer_are_left_out() -> None:
    """Links are fast: by what their busiest segments take alone pipelines are known to be longer.
    Other orders are not even looked at, in which ranks would wait less."""
    said: list[str] = []
    graph = trace(Chain([256] * 13), (torch.randn(4096, 256),), {}).graph
    plan = answer(asked(graph, 8, stages="auto", microbatches="auto"), said.append)
    assert not plan.structure.is_pipeline
    assert not any(": about " in text for text in said)
    results = [e.result for e in plan.provenance.candidates if "stages" in e.candidate]
    assert len(results) >= 2 and {*results} == {"not better"}
    assert not any("zb-" in text or "interleaved" in text for text in said)


def test_orders_share_plans_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved, stages hold more microbatches meanwhile, and take as long each."""
    graph = trace(Chain([32] * 9), (torch.randn(64, 32),), {}).graph
    known = SegmentSearch(asked(graph, 4, stages="auto", microbatches=8), Trail(silent))
    plain, interleaved = (make_schedule("1f1b", 2, 8), make_schedule("interleaved", 2, 8, 2))
    first = known.divided(plain)
    solved: list[object] = []
    monkeypatch.setattr(segment_plans, "best_as_stated", lambda *_: solved.append(1))
    shared = known.divided(interleaved)
    assert not solved and first.step_ns > 0
    monkeypatch.undo()
    alone = SegmentSearch(known.graph_request, Trail(silent)).divided(interleaved)
    assert alone == shared


def test_a_mesh_that_is_beaten_without_a_limit_is_not_planned_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, table = (
        trace(Chain([256] * 9), (torch.randn(512, 256),)).graph,
        make_schedule("1f1b", 2, 8),
    )
    tight = asked(graph, 2, stages=2, microbatches=8, memory_limit=5 << 20)
    within: list[int] = []
    monkeypatch.setattr(SegmentPlans, "plan_within", lambda _, limit: within.append(limit))
    roomy = asked(graph, 2, stages=2, microbatches=8)
    hoped_ns = SegmentSearch(roomy, Trail(silent)).divided(table).step_ns
    with pytest.raises(Beaten):
        SegmentSearch(tight, Trail(silent)).divided(table, hoped_ns)
    assert not within
    SegmentSearch(tight, Trail(silent)).divided(table, hoped_ns + 1)
    assert within


Took = Mapping[tuple[int, int, str], tuple[int, float]]
"""What a step takes by ranks, microbatches and order, and for which part the busiest rank waits."""


class Known(SegmentSearch):
    """Steps of which it is known what they take; of others 500."""

    def __init__(self, wanted: GraphRequest, took: Took) -> None:
        super().__init__(wanted, Trail(silent))
        self.took = took
        self.asked_for: list[tuple[int, int, str]] = []

    def divided(
        self,
        table: PipelineSchedule,
        known_ns: int | None = None,
        mesh: str = "",
        sizes: Sequence[int] = (),
    ) -> Divided:
        ranks = len(table.rows)
        name = "1f1b"
        if table.is_split or table.num_stages > ranks:
            name = "zb-h1" if table.num_stages == ranks else "other"
        shape = ranks, table.microbatches, name
        self.asked_for.append(shape)
        step_ns, waits = self.took.get(shape, (500, 0.0))
        if known_ns is not None and step_ns >= known_ns:
            raise Beaten("stages", step_ns)
        return Divided((Mesh(()),), (), step_ns, waits, 0, 0, {}, is_within=True, is_tight=False)


def best_shapes(
    wanted: GraphRequest, ways: SegmentSearch, tried: CandidateSearch[Finding]
) -> list[tuple[PipelineShape, Divided]]:
    """What is divided, best first."""
    promising = PipelineCandidates(PipelineShapes(wanted), tried)
    for shape, mesh in promising.to_divide():
        with promising.dividing(shape):
            known_ns = promising.known_ns()
            divided = ways.divided(shape.actions, known_ns, mesh, shape.sizes)
            promising.estimate(shape, divided)
    return sorted(promising.estimated, key=lambda each: each[1].step_ns)


def test_a_number_of_ranks_that_waits_most_is_looked_at_again() -> None:
    """In the numbers of microbatches that are considered first two ranks are better; four, which
    wait longer, are the best in fewer, and better still in an order in which they wait less."""
    took = {
        (2, 8, "1f1b"): (220, 0.1), (2, 4, "1f1b"): (215, 0.2), (4, 16, "1f1b"): (228, 0.3),
        (4, 8, "1f1b"): (205, 0.35), (4, 8, "zb-h1"): (180, 0.1), (8, 32, "1f1b"): (400, 0.1),
    }  # fmt: skip
    graph = trace(Chain([32] * 17), (torch.randn(64, 32),), {}).graph
    wanted = asked(graph, 8, stages="auto", microbatches="auto")
    known = Known(wanted, took)
    (best, divided), *_ = best_shapes(wanted, known, findings(Trail(silent)))
    assert (best.ranks, best.microbatches, best.schedule) == (4, 8, "zb-h1")
    assert divided.step_ns == 180
    # Eight ranks take longer than that even if they wait for nobody, and work less in fewer.
    assert not any(shape[0] == 8 and shape[1] != 32 for shape in known.asked_for)


class AsIs(Known):
    """Whatever is known, what takes longer is told."""

    def divided(
        self,
        table: PipelineSchedule,
        known_ns: int | None = None,
        mesh: str = "",
        sizes: Sequence[int] = (),
    ) -> Divided:
        return super().divided(table, None, mesh, sizes)


def plain_of(graph: Graph, step_ns: int) -> Finding:
    """In one stage; it takes so long."""
    plan = best_of_all(asked(graph, 1, microbatches="auto"), Trail(silent))
    return replace(plan, estimates=repriced(plan.estimates, step_ns=step_ns))


def test_fewer_microbatches_in_which_ranks_work_less_are_looked_at() -> None:
    """Though none of those that are considered first is as good as one stage, however long its
    ranks wait."""
    took = {
        (2, 8, "1f1b"): (495, 0.05), (4, 16, "1f1b"): (527, 0.1), (4, 8, "1f1b"): (374, 0.1),
        (4, 4, "1f1b"): (329, 0.1),
    }  # fmt: skip
    graph = trace(Chain([32] * 17), (torch.randn(64, 32),), {}).graph
    wanted = asked(graph, 4, stages="auto", microbatches="auto")
    tried = findings(Trail(silent))
    tried.submit(plain_of(graph, 375))
    best = best_shapes(wanted, AsIs(wanted, took), tried)[0][0]
    assert (best.ranks, best.microbatches) == (4, 4)


def test_what_takes_longer_than_was_thought_does_so_in_all_shapes_of_as_many_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else three shapes of two ranks were planned, and no more."""
    graph = chain(64, 64, 64)
    some = best_of_all(asked(graph, 1), Trail(silent))
    thought = {(2, 2): 90, (2, 4): 91, (2, 8): 92, (4, 4): 100}
    takes, planned = {2: 130, 4: 101}, list[int]()

    class Promised(PipelineCandidates):
        def __init__(self, shapes: PipelineShapes, tried: CandidateSearch[Finding]) -> None:
            super().__init__(shapes, tried)
            self.estimated = [
                (PipelineShape(ranks, count, "1f1b"), cast("Any", SimpleNamespace(step_ns=step_ns)))
                for (ranks, count), step_ns in thought.items()
            ]

        def others(self, best: Finding) -> tuple[Other, ...]:
            return ()

        def to_divide(self) -> Iterator[tuple[PipelineShape, str]]:
            yield from ()

    class Pipeline:
        def __init__(self, _asked: object, shape: PipelineShape, *_: object) -> None:
            self.ranks = shape.ranks

        def planned(self) -> Finding:
            planned.append(self.ranks)
            return replace(some, estimates=repriced(some.estimates, step_ns=takes[self.ranks]))

    monkeypatch.setattr(pipelining, "PipelineCandidates", Promised)
    monkeypatch.setattr(pipelining, "_Pipeline", Pipeline)
    found = search_stages(asked(graph, 4, stages="auto", microbatches="auto"), Trail(silent))
    assert planned == [2, 4]
    assert found.step_ns == 101
