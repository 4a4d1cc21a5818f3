"""Losses in chunks where memory binds, and nowhere else, as it was priced."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.compile import ModelCall, plan_call
from autopar.driver.search.finding import Finding
from autopar.driver.search.frontier import find_frontier
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.meshes import survey
from autopar.driver.search.on_mesh import best_on_mesh
from autopar.driver.search.open_counts import (
    chunk_count,
    chunk_ladder,
    most_saved_bytes,
    possible_counts,
)
from autopar.errors import ArgumentError, InfeasibleError, NotImposedWarning
from autopar.ir.own_ops import LINEAR, SCORES
from autopar.ir.problem import Problem, Solution
from autopar.plans.memory_refinement import Candidate
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import OutputOptions, PlanOptions
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.runtime.simulator.spmd import train_step
from autopar.solver import solve
from autopar.solver.search import silent
from autopar.tracer import Traced
from tests.codegen.models import MODELS, case
from tests.codegen.test_random_plans import difference
from tests.layouts import program_of
from tests.planned import hostless, on_h100

BATCH, LENGTH, VOCAB = 8, 32, 2048


def language() -> nn.Module:
    """A model whose scores are most of what it holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@cache
def traced(*unread: str) -> Traced:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    options = Options(PlanOptions(outputs=OutputOptions(unread=unread)))
    call = ModelCall(language(), (), {"input_ids": ids, "labels": ids}, options)
    return plan_call(call, lambda _: None)[0]


def request(
    limit: int | None, chunks: int | str, *unread: str, microbatches: int | str = 1
) -> PlanRequest:
    options = make_options(
        mesh="2",
        optimizer="sgd",
        microbatches=microbatches,
        memory={"limit": limit, "loss_chunks": chunks},
        backend="eager",
        outputs={"unread": unread},
    )
    cluster, mesh = on_h100("2")
    return make_graph_request(traced(*unread).graph, cluster, options).on(mesh)


def best(limit: int | None, chunks: int | str, *unread: str) -> Candidate:
    return best_on_mesh(request(limit, chunks, *unread), Trail(silent))


def chunks_of(found: Candidate) -> int:
    return found.structure.loss_chunks


def test_only_where_memory_binds() -> None:
    free = best(None, "auto", "logits")
    assert chunks_of(free) == 1 == chunks_of(best(free.estimates.memory.total, "auto", "logits"))
    lean = best(None, 16, "logits").estimates.memory.total
    assert lean < free.estimates.memory.total / 3
    limit = lean * 11 // 10
    with pytest.raises(InfeasibleError):
        best(limit, 1, "logits")
    found = best(limit, "auto", "logits")
    assert chunks_of(found) == chunk_count(request(limit, "auto", "logits")) > 1
    assert found.estimates.memory.total <= limit
    with pytest.raises(InfeasibleError, match="the smallest-memory plan"):
        best(lean // 3, "auto", "logits")


@pytest.mark.parametrize(("times", "least"), [(110, 1), (60, 2)])
def test_the_search_begins_near_a_likely_number_of_microbatches(times: int, least: int) -> None:
    """What surely does not fit is not planned, and nothing that it passes by is better."""
    limit = best(None, 16, "logits").estimates.memory.total * times // 100
    asked, trail = request(limit, "auto", "logits", microbatches="auto"), Trail(silent)
    found = best_on_mesh(asked, trail)
    assert least <= found.request.microbatches
    assert found.estimates.memory.total <= limit
    outcomes = {each.candidate: each.result for each in trail.outcomes}
    assert outcomes[asked.name] in ("skipped", "infeasible")
    alone: list[int] = []
    for count in possible_counts(asked.graph, asked.cluster.num_devices):
        with suppress(InfeasibleError):
            options = replace(asked.options, microbatches=count)
            each = best_on_mesh(replace(asked, options=options, microbatches=count), Trail(silent))
            alone.append(each.solution.objective)
    assert found.solution.objective == min(alone)


def test_what_is_priced_is_what_is_played() -> None:
    for chunks in (2, 16):
        found = best(None, chunks)
        assert found.solution.objective == found.estimates.modelled_ns
        assert abs(found.estimates.step_ns / found.estimates.modelled_ns - 1) < 0.1


def test_scores_that_nobody_reads_take_less() -> None:
    held = {unread: best(None, 16, *unread).estimates for unread in ((), ("logits",))}
    ops = {unread: best(None, 16, *unread).request.step for unread in held}
    assert any(node.op == SCORES for node in ops[()].nodes)
    assert any(node.op == LINEAR for node in ops[("logits",)].nodes)
    scores = 4 * BATCH * LENGTH * VOCAB // 2
    saved = held[()].memory.total - held[("logits",)].memory.total
    assert 0.9 * scores < saved
    # They are made once more.
    assert held[()].compute_ns < held[("logits",)].compute_ns


def test_more_chunks_hold_less_and_take_no_less_time() -> None:
    found = [best(None, chunks, "logits").estimates for chunks in (2, 4, 8, 16)]
    held = [each.memory.total for each in found]
    assert held == sorted(held, reverse=True) and held[-1] < held[0]
    times = [each.modelled_ns for each in found]
    assert times == sorted(times)


def test_where_there_is_little_to_save_it_is_not_tried() -> None:
    small = request(80 << 30, "auto")
    assert chunk_count(small) == 1
    said: list[str] = []
    best_on_mesh(small, Trail(said.append))
    assert not any("chunks" in text for text in said)
    assert chunk_count(replace(small, graph=case("mlp").traced.graph).within(1000)) == 1


def test_what_counts_is_as_large_as_the_scores() -> None:
    """Scores of float32, what the loss makes of them, and their gradient."""
    scores = 4 * BATCH * LENGTH * VOCAB // 2
    assert most_saved_bytes(request(None, "auto")) == 3 * scores
    assert chunk_count(request(32 * 2 * scores, "auto")) == 2
    assert chunk_count(request(32 * 2 * scores + 1, "auto")) == 1


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("tolerance", "is_tried"), [(0.0, True), (0.9, False)])
def test_chunks_that_would_save_less_than_is_tolerated_are_not_planned(
    monkeypatch: pytest.MonkeyPatch, tolerance: float, is_tried: bool
) -> None:
    tried: list[int] = []

    def best_on(asked: PlanRequest, *args: Any, **kwargs: Any) -> Candidate:
        tried.append(asked.loss_chunks)
        return compile.best_on(asked, *args, **kwargs)

    compile = import_module("autopar.compile")
    limit = best(None, 1, "logits").estimates.memory.total * 95 // 100
    monkeypatch.setattr("autopar.driver.search.on_mesh.best_on", best_on)
    asked = replace(request(limit, "auto", "logits"), tolerance=tolerance)
    found = best_on_mesh(asked, Trail(silent))
    assert found.estimates.memory.total <= limit
    assert tried[0] == 1 and (len(tried) > 1) == is_tried


@pytest.mark.nightly
def test_no_count_that_is_tried_is_better_than_what_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few chunks take less time: only where they do not fit are there more."""
    monkeypatch.setattr("autopar.driver.search.open_counts._ROWS", 2)
    limit = best(None, 16, "logits").estimates.memory.total * 51 // 50
    asked = request(limit, "auto", "logits")
    ladder = chunk_ladder(asked)
    assert 1 < len(ladder) <= 3 and ladder[-1] == chunk_count(asked) > 16
    found = best(limit, "auto", "logits")
    assert 1 < chunks_of(found) < ladder[-1]
    for count in ladder:
        try:
            alone = best(limit, count, "logits")
        except InfeasibleError:
            continue
        assert found.solution.objective <= alone.solution.objective
        assert found.solution.bound <= alone.solution.objective


def test_without_a_limit_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory binds on the whole loss, chunks start from what is known of that."""
    flow = sys.modules["autopar.compile"]
    limits: list[int | None] = []

    def counted(problem: Problem, **options: Any) -> Solution:
        limits.append(problem.usage_limit)
        return solve(problem, **options)

    monkeypatch.setattr(flow, "solve", counted)
    free = best(None, 1, "logits").estimates.memory.total
    limits.clear()
    limit = free * 95 // 100
    found = best(limit, "auto", "logits")
    assert limits.count(None) == 1 and len(limits) > 2
    for chunks in (1, chunks_of(found)):
        alone = best(limit, chunks, "logits")
        assert found.solution.objective <= alone.solution.objective
        assert found.solution.bound <= alone.solution.objective


@pytest.mark.nightly
def test_a_frontier_has_a_plan_where_there_is_one_within_the_limit() -> None:
    """The memory of the device would not have the loss in chunks at all."""
    lean = best(None, 16, "logits").estimates.memory.total
    limits = (lean * 2, lean * 11 // 10)
    asked = request(None, "auto", "logits")
    assert chunk_count(asked) == 1
    frontier = find_frontier(
        make_graph_request(asked.graph, asked.cluster, asked.options), limits, silent
    )
    for point in frontier.points:
        alone = best(point.limit_bytes, "auto", "logits")
        assert point.plan is not None
        assert point.plan.estimates.memory.total <= point.limit_bytes
        assert point.plan.provenance.bound_ns <= alone.solution.objective
        assert point.plan.estimates.stages[0].modelled_ns <= alone.estimates.modelled_ns


def test_a_step_without_a_head_says_so() -> None:
    options = make_options(mesh="2", optimizer="sgd", backend="eager", memory={"loss_chunks": 4})
    with pytest.warns(NotImposedWarning, match="loss_chunks=4: the step has no loss"):
        asked = make_graph_request(case("mlp").traced.graph, hostless("2xH100"), options)
    assert chunks_of(survey(asked, Trail(silent)).only) == 1


class TwoHeads(nn.Module):
    """The loss of the second head is smoothed, which leaves it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        one, other = (head(self.table(ids)) for head in self.heads)
        return functional.cross_entropy(one, ids) + functional.cross_entropy(
            other, ids, label_smoothing=0.1
        )


def test_the_one_of_two_losses_that_stays_whole_is_told() -> None:
    ids = torch.randint(0, 16, (24,))
    with pytest.warns(NotImposedWarning, match="loss_chunks=4: nll_loss.* stays whole") as told:
        plan = autopar.plan(TwoHeads(), ids, cluster="1xcpu", memory={"loss_chunks": 4})
    assert len(told) == 1 and plan.structure.loss_chunks == 4


@pytest.mark.parametrize("name", ["logits", "1", "log*"])
def test_an_output_is_not_left_out_and_differentiable(name: str) -> None:
    ids = torch.randint(0, 48, (4, 8))
    model, _ = MODELS["llama"]()
    inputs = {"input_ids": ids, "labels": ids}
    with pytest.raises(ArgumentError, match=r"output logits is among outputs\.unread"):
        autopar.plan(
            model, inputs, cluster="1xcpu", outputs={"unread": "logits", "differentiable": name}
        )


def test_a_plan_file_says_it_only_where_it_is_so() -> None:
    whole, chunked = (survey_of(chunks).plan() for chunks in (1, 4))
    assert b"loss_chunks" not in msgspec.json.encode(whole.structure)
    assert b'"loss_chunks":4' in msgspec.json.encode(chunked.structure)
    for plan in (whole, chunked):
        assert Plan.from_bytes(plan.to_bytes()) == plan


def survey_of(chunks: int) -> Finding:
    options = make_options(
        mesh="2", optimizer="sgd", backend="eager", memory={"loss_chunks": chunks}
    )
    return survey(make_graph_request(traced().graph, hostless("2xH100"), options), Trail(silent))


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("cluster", "mesh", "strategy"),
    [
        ("2xH100", "2", "ddp"),
        ("2xH100", "2", "fsdp"),
        ("4xH100", "4", "megatron"),
        ("2x2xH100", "2x2", "2d"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_strategies_are_eager(cluster: str, mesh: str, strategy: str, backend: str) -> None:
    found = case("llama")
    options = make_options(
        mesh=mesh, constraints={"strategy": strategy}, backend=backend, memory={"loss_chunks": 3}
    )
    plan = survey(
        make_graph_request(found.traced.graph, hostless(cluster), options), Trail(silent)
    ).plan()
    assert plan.structure.loss_chunks == 3
    assert abs(plan.estimates.step_ns / plan.estimates.stages[0].modelled_ns - 1) < 0.1
    assert "lm_head:forward:scores_nll.0" in plan.structure.only.ops
    program = program_of(found.traced, plan.structure.only)
    step = train_step(
        program, plan.structure.only.mesh, found.traced.graph, plan.structure.only, found.tensors,
        tolerance=1e-5,
    )  # fmt: skip
    worst = {n: difference(g, found.gradients[n]) for n, g in step.gradients.items()}
    assert step.gradients.keys() == found.gradients.keys() and max(worst.values()) <= 1e-5
    assert difference(step.outputs["loss:0"], found.loss) <= 1e-5


def test_the_last_stage_of_a_pipeline_has_it() -> None:
    ids = torch.randint(0, 48, (4, 8))
    inputs = {"input_ids": ids, "labels": ids}
    model, _ = MODELS["llama"]()
    plan = autopar.plan(
        model,
        inputs,
        cluster="2xcpu",
        pipeline={"stages": 2},
        microbatches=2,
        memory={"loss_chunks": 3},
    )
    parts = [part.loss_chunks for part in plan.structure.stages]
    assert parts == [1, 3]
    autopar.verify(plan, model, inputs)
