"""Plans in stages: equal to eager, within memory, no slower than a split by layers, and told."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.cluster.parts import axis_between, part_of, place_parts
from autopar.compile import best_on
from autopar.driver.planning import answer
from autopar.errors import (
    ArgumentError,
    ClusterError,
    InfeasibleError,
    PlanMismatchError,
    StageError,
)
from autopar.ir.mesh import Mesh
from autopar.ir.passes.microbatches import in_microbatches, in_other_microbatches
from autopar.ir.pipeline import Action
from autopar.ir.sharding import Sharding
from autopar.plans.compatibility import check_world
from autopar.plans.memory_refinement import Candidate
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.report.cost_comparison import MEMORY
from autopar.report.difference import compare
from autopar.runtime.process.stage_groups import storage_in_stages
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.grouped import grouped
from tests.planned import hostless


def llama(vocabulary: int = 64, *, tied: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=32, head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, vocab_size=vocabulary,
        max_position_embeddings=32, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    ids = torch.randint(64, (8, 16))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@cache
def planned(**options: Any) -> Plan:
    return autopar.plan(*llama(), cluster=hostless("4xH100"), **grouped(**options))


@pytest.mark.breadth(5)
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "microbatches": 4},
        pytest.param(
            {"stages": 4, "microbatches": 8, "schedule": "gpipe"}, marks=pytest.mark.nightly
        ),
        pytest.param(
            {"stages": 4, "microbatches": 4, "schedule": "interleaved:2"},
            marks=pytest.mark.nightly,
        ),
        {"cuts": "model.layers.5", "microbatches": 2},
        {"stages": 2, "microbatches": 1, "strategy": "fsdp"},
    ],
    ids=str,
)
def test_chosen_stages_are_eager(options: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(**options)
    plan.save(tmp_path / "llama.plan.json")
    stored = Plan.load(tmp_path / "llama.plan.json")
    assert stored == plan and stored.world_size == 4
    assert len(stored.stages) == options.get("stages", 2)
    assert autopar.verify(stored, *llama()).differences


def test_the_step_is_that_of_all_stages_together() -> None:
    plan = planned(stages=2, microbatches=4)
    estimates, table = plan.estimates, plan.structure.actions
    played = simulate_pipeline(table, estimates.stages, estimates.delays, estimates.shared)
    assert played.step_ns == estimates.step_ns
    first, second = (stage.estimates.microbatch for stage in plan.stages)
    forth = next(d.time_ns for d in estimates.delays if d.phase == "forward")
    start = played.spans[Action.parse("1F0")].start
    assert start == first.forward_ns + forth > first.forward_ns
    least = 3 * (second.forward_ns + second.backward_ns)
    assert estimates.step_ns > start + least
    assert 0 < estimates.bubble_ns < estimates.step_ns


def test_a_device_that_has_all_stages_waits_for_none() -> None:
    """Its parts take a little less in the pipeline than each stage's own step of them does."""
    order = {"stages": 2, "schedule": "interleaved:2"}
    plan = autopar.plan(*llama(), cluster="1xH100", pipeline=order, microbatches=4)
    estimates = plan.estimates
    assert sum(stage.estimates.step_ns for stage in plan.stages) > estimates.step_ns
    assert estimates.bubble_ns == 0


def test_a_tied_weight_lies_alike_in_all_its_stages() -> None:
    """Alone, the last stage would not have it in shards."""
    found = autopar.plan(
        *llama(tied=True), cluster=hostless("4xH100"), pipeline={"stages": 2}, microbatches=4
    )
    first, last = (
        stage.params["model.embed_tokens.weight"].choice for stage in found.structure.stages
    )
    assert first.storage == last.storage == Sharding.parse("[S(1)]")
    assert str(last) == "[S(1)]|[R]"


@pytest.mark.nightly
def test_a_strategy_speaks_of_a_tied_weight_in_all_its_stages() -> None:
    """It asks for shards where the weight is that of a product: in the last stage."""
    found = autopar.plan(
        *llama(tied=True),
        cluster=hostless("2x2xH100"),
        pipeline={"stages": 2},
        microbatches=2,
        constraints={"strategy": "megatron"},
    )
    storage, ranks = storage_in_stages(found.structure.stages), (0, 2)
    first, stored = storage["model.embed_tokens.weight"]
    assert first == ranks and not stored.is_replicated
    assert not any("tied" in line for line in found.provenance.imposed)


class Tied(nn.Module):
    """A head that reads the embedding, which is most of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(512, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return nn.functional.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), ids.flatten())


def test_a_tied_weight_lives_on_the_host_in_all_its_stages_or_in_none() -> None:
    """The first stage has room for it on the device; the last one has none where memory binds."""
    inputs = (torch.arange(512).reshape(32, 16),)
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
    options["cluster"] = hostless("2xH100")
    free = autopar.plan(Tied(), inputs, **grouped(**options))
    fullest = max(memory.total for memory in free.estimates.devices)
    for part, is_on_host in ((1.0, False), (0.9, True)):
        limit = int(fullest * part)
        found = autopar.plan(
            Tied(), inputs, **grouped(**options, residency="auto", memory_limit=limit)
        )
        for stage, own in zip(found.structure.stages, found.stages, strict=True):
            assert bool(stage.params["embed.weight"].choice.num_on_host) == is_on_host
            assert own.estimates.memory.total <= limit
        autopar.verify(found, Tied(), inputs)
    with pytest.raises(InfeasibleError, match="the smallest-memory plan needs"):
        little = grouped(**options, residency="auto", memory_limit=int(0.4 * fullest))
        autopar.plan(Tied(), inputs, optimizer="adafactor", **little)


@pytest.mark.nightly
def test_an_uneven_model_is_cut_unevenly() -> None:
    """A head that takes as long as many layers leaves its stage few of them."""
    config = LlamaConfig(
        num_hidden_layers=8, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=2048, vocab_size=128_000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(16, 1024, dtype=torch.long)
    given: dict[str, Any] = {"cluster": "2xH100", "microbatches": 8}
    inputs = {"input_ids": ids, "labels": ids}
    chosen = autopar.plan(model, inputs, **grouped(stages=2, **given))
    halves = autopar.plan(model, inputs, **grouped(cuts="model.layers.4", **given))
    start = chosen.structure.stages[1].start
    assert start in ("model.layers.6", "model.layers.7", "model.norm", "lm_head")
    assert chosen.estimates.step_ns < 0.8 * halves.estimates.step_ns
    assert chosen.provenance.bound_ns <= chosen.provenance.objective_ns


def whole(in_flight: int, limit: int | None = None) -> Candidate:
    model, inputs = llama()
    graph = trace(model, (), inputs).graph
    options = make_options(mesh="1", memory={"limit": limit}, backend="eager", microbatches=8)
    asked = replace(make_graph_request(graph, hostless("1xH100"), options), in_flight=in_flight)
    return best_on(asked.on(Mesh(())), silent)


def test_what_is_in_flight_is_held_and_kept_within_the_limit() -> None:
    one, three = whole(1).estimates.memory, whole(3).estimates.memory
    # The count of a loss's targets is saved in all turns but the last.
    assert three.saved == pytest.approx(3 * one.saved, rel=1e-3)
    assert three.transient == one.transient
    limit = (one.total + three.total) // 2
    found = whole(3, limit)
    assert found.is_tight and found.structure.recompute
    assert found.estimates.memory.total <= limit


def test_stages_that_differ_in_names_alone_are_planned_once() -> None:
    said: list[str] = []
    model, inputs = llama()
    graph = trace(model, (), inputs).graph
    options = make_options(
        backend="eager",
        microbatches=2,
        pipeline={
            "schedule": "gpipe",
            "cuts": ["model.layers.1", "model.layers.2", "model.layers.3"],
        },
    )
    plan = answer(make_graph_request(graph, hostless("4xH100"), options), said.append)
    assert sum(line.startswith("planning stage") for line in said) == 3
    second, third = plan.structure.stages[1:3]
    assert second.ops == third.ops
    assert [n.replace("layers.1", "layers.2") for n in second.params] == [*third.params]


def test_what_differs_between_pipelines_is_told() -> None:
    a, b = planned(stages=2, microbatches=4), planned(cuts="model.layers.5", microbatches=2)
    assert not compare(a, a).differs
    topics = {topic.title: topic for topic in compare(a, b).topics}
    changed = {change.what for change in topics["pipeline"].changes}
    assert changed == {"schedule", "microbatches", "stages begin with"}
    found = compare(a, planned(microbatches=1))
    assert not {
        change.what
        for topic in found.topics
        if topic.cause == "request"
        for change in topic.changes
    }
    names = [figure.name for figure in found.costs if figure.section == MEMORY]
    assert len(set(names)) == len(names)


def test_parts_of_a_cluster() -> None:
    cluster = parse_cluster("4x8xH100")
    assert [level.size for level in part_of(cluster, 8).levels] == [8]
    assert [level.size for level in part_of(cluster, 16).levels] == [2, 8]
    assert [level.size for level in part_of(cluster, 2).levels] == [2]
    assert part_of(cluster, 1).num_devices == 1
    assert axis_between(cluster, 0, 8, 4).crossed == cluster.levels[0].link
    assert axis_between(cluster, 8, 12, 8).crossed == cluster.levels[1].link
    with pytest.raises(ClusterError, match="no even parts of 12 devices"):
        part_of(cluster, 12)
    assert place_parts(cluster, [8, 8, 8, 8]) == (0, 8, 16, 24)
    assert place_parts(cluster, [16, 8, 4, 4]) == (0, 16, 24, 28)
    assert place_parts(parse_cluster("8xH100"), [2, 4, 2]) == (0, 2, 6)
    # One after the other the second would be half in a node, half in the next.
    assert place_parts(cluster, [4, 8, 16, 4]) == (24, 16, 0, 28)
    with pytest.raises(ClusterError, match="parts of 8, 8 devices are 16, but cluster 4x8xH100"):
        place_parts(cluster, [8, 8])
    with pytest.raises(ClusterError, match="no even parts of 12 devices: 12 are no multiple of 8"):
        place_parts(cluster, [12, 12, 8])
    assert place_parts(cluster, [3, 5, 24]) == (0, 3, 8)
    with pytest.raises(ClusterError, match="no even parts of 27 devices"):
        place_parts(cluster, [5, 27])
    with pytest.raises(ClusterError, match="parts of 5, 5, 6, 16 devices do not lie evenly"):
        place_parts(cluster, [5, 5, 6, 16])


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(StageError, match="4 devices are not shared by 5 ranks in parts that lie"):
        planned(stages=5, microbatches=2)
    with pytest.raises(StageError, match=r"no stage begins at 'model\.layers\.9'"):
        planned(cuts="model.layers.9", microbatches=2)
    with pytest.raises(ArgumentError, match="schedule='1f2b': write"):
        planned(stages=2, schedule="1f2b")
    with pytest.raises(StageError, match="2 stages are more than the model has parts: 1"):
        autopar.plan(nn.Linear(4, 4), (torch.zeros(8, 4),), cluster="4xcpu", pipeline={"stages": 2})
    found = planned(stages=2, microbatches=4).structure
    with pytest.raises(PlanMismatchError, match=r"\(mesh dp=2 of each of 2 ranks\), but 1 process"):
        check_world(found, 1)


def test_what_goes_from_one_segment_to_the_next_is_not_forgotten() -> None:
    """Of these the layers are best whole and the head in shards, each for itself: messages between
    them took twice as long as all else."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
            self.head = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.layers(x)), y)

    inputs = torch.zeros(8, 16), torch.arange(8) % 5
    options: dict[str, Any] = {"stages": 2, "microbatches": 2, "mesh": "2"}
    found = autopar.plan(Small(), inputs, cluster="4xcpu", **grouped(**options))
    assert [stage.estimates.exposed_communication_ns for stage in found.stages] == [0, 0]


@pytest.mark.nightly
def test_as_many_stages_as_are_best() -> None:
    """Where links are slow, weights are many and little is computed, stages beat sharding."""
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=4096, vocab_size=512, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(16, 256, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    cluster = parse_cluster("2x1xRTX3090")
    slow = replace(cluster.levels[0].link, bytes_per_s=1.25e9, curves=())
    cluster = replace(cluster, levels=(replace(cluster.levels[0], link=slow), *cluster.levels[1:]))
    auto = autopar.plan(model, inputs, cluster=cluster, pipeline={"stages": "auto"})
    plain = autopar.plan(model, inputs, cluster=cluster, pipeline={"stages": 1})
    assert auto.structure.is_pipeline and not plain.structure.is_pipeline
    assert auto.estimates.step_ns < plain.estimates.step_ns


class Gated(nn.Module):
    """Layers under a gate that is computed before the first of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        gate = x.sigmoid()
        for layer in self.layers:
            x = layer(x).tanh() * gate
        return x.square().mean()


def test_what_is_made_again_does_not_say_where_to_cut() -> None:
    """On a GPU backward makes cheap ops again: copies, which belong where their originals do."""
    inputs = (torch.randn(8, 16),)
    plan = autopar.plan(Gated(), inputs, cluster="4xH100", pipeline={"stages": 2}, microbatches=2)
    assert plan.structure.stages[1].start.startswith("layers.")
    assert autopar.verify(plan, Gated(), inputs).differences


class TiedInList(nn.Module):
    """The weight of the first layer is that of the last of its kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_a_weight_tied_within_a_list_is_stored_as_others_of_the_list() -> None:
    inputs = (torch.randn(8, 8),)
    found = autopar.plan(
        TiedInList(),
        inputs,
        cluster=hostless("4xH100"),
        pipeline={"stages": 2, "cuts": "layers.2"},
        microbatches=2,
    )
    assert {stage.num_devices for stage in found.structure.stages} == {2}
    autopar.verify(found, TiedInList(), inputs)


def test_tensors_without_elements_stay_so_in_other_microbatches() -> None:
    """A mixture of experts counts what none of them took."""
    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, vocab_size=96, max_position_embeddings=32,
        use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 96, (8, 16))
    graph = trace(MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids}).graph
    two = in_microbatches(graph, 2)
    assert any(0 in tensor.shape for node in two.nodes for tensor in node.outputs)
    assert in_other_microbatches(two, graph, 4) == in_microbatches(replace(graph), 4)
