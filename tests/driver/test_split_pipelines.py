"""Pipelines whose backward comes in two parts, and those in an order that a user has written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.cost_model.pipeline import add_up
from autopar.driver.planning import answer
from autopar.driver.search.pipeline_shapes import PipelineShape, other_orders
from autopar.errors import ArgumentError, PlanError, StageError
from autopar.ir.mesh import Level, Link, Mesh
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import cut_at, in_stages, in_two_parts
from autopar.ir.pipeline import Action, PipelineSchedule, Waiting
from autopar.plans.estimates import MicrobatchTimes
from autopar.plans.layout import parse_layout
from autopar.plans.memory_refinement import Candidate
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.plans.scheduling.events import schedule
from autopar.report.difference import compare
from autopar.report.pipeline import pipeline_content
from autopar.report.summary import summarize
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.driver.test_pipelining import llama, planned
from tests.driver.test_segments import Chain, asked
from tests.grouped import grouped
from tests.planned import hostless
from tests.redone import redecided
from tests.report.plans import Order, in_order, two_axis_plan

TABLE = """
0F0 0F1 2F0 0F2 2B0 0B0 2F1 2W0 2B1 0W0 0B1 2F2 2B2 0B2 0W1 2W1 0W2 2W2
1F0 1F1 1B0 1F2 1W0 1B1 1B2 1W1 1W2
"""
"""Three stages on two ranks, two of them on the first."""

UNSPLIT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
        {"stages": 4, "microbatches": 4, "schedule": "zb-v"},
        {"cuts": "model.layers.5", "microbatches": 1, "schedule": "zb-h1", "strategy": "fsdp"},
        {"schedule": UNSPLIT},
    ],
    ids=str,
)
def test_chosen_stages_are_eager(options: dict[str, Any], tmp_path: Path) -> None:
    plan = planned(**options)
    plan.save(tmp_path / "llama.plan.json")
    stored = Plan.load(tmp_path / "llama.plan.json")
    assert stored == plan
    assert autopar.verify(stored, *llama()).differences
    is_split = options["schedule"] != UNSPLIT
    for stage in stored.stages:
        assert stage.structure.is_split == is_split
        assert (stage.estimates.microbatch.weights_ns > 0) == is_split


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("order", ["zb-h1", "zb-v"])
def test_any_number_of_stages_and_microbatches(order: str, stages: int, microbatches: int) -> None:
    plan = planned(stages=stages, microbatches=microbatches, schedule=order)
    assert autopar.verify(plan, *llama()).differences


def test_a_table_is_planned_stored_replayed_and_drawn(tmp_path: Path) -> None:
    model, inputs = llama()
    inputs = {name: x[:6] for name, x in inputs.items()}
    (tmp_path / "own.table").write_text(TABLE)
    plan = autopar.plan(
        model, inputs, cluster=hostless("4xH100"), pipeline={"schedule": tmp_path / "own.table"}
    )
    plan.save(tmp_path / "own.plan.json")
    stored = Plan.load(tmp_path / "own.plan.json")
    assert stored == plan and autopar.verify(stored, model, inputs).differences
    structure = stored.structure
    assert (structure.schedule, structure.microbatches) == ("table", 3)
    assert structure.schedule_rows == tuple(TABLE.strip().splitlines())
    assert [stage.first_rank for stage in stored.structure.stages] == [0, 2, 0]
    assert stored.estimates.step_ns == stepped(stored)
    drawn = str(summarize(stored))
    assert "table of 3 microbatches" in drawn and "in capitals" in drawn
    picture = pipeline_content(stored).picture
    assert all("A" in row and "C" in row for row in picture)
    # Two stages are on one device, which is to hold both.
    assert {stage.estimates.memory_limit for stage in stored.stages} == {80 * 10**9}
    assert len(stored.estimates.devices) == 2


def stepped(plan: Plan) -> int:
    table = plan.structure.actions
    own = plan.estimates
    return simulate_pipeline(table, own.stages, own.delays, own.shared).step_ns


def test_contradictions_are_told() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stages": 2}, "stages=2: the table has 3"),
        ({"microbatches": 4}, "microbatches=4: the table has 3"),
        ({"cuts": "model.layers.5"}, "2 stages are cut: the table has 3"),
    ]
    for given, words in cases:
        with pytest.raises(ArgumentError, match=words):
            planned(schedule=TABLE, **given)
    for table, words in (
        ("0F0 0B0", "one stage, which is no pipeline"),
        ("0F0 0B0\n1B0 1F0", "wait for each other"),
        ("0F0 0B0\n1F0 1X0", "'1X0' is no action"),
        ("0F0 0B0 0W0 0W1\n1F0 1B0", "stage 0 does F of microbatches"),
    ):
        with pytest.raises(ArgumentError, match=f"schedule: .*{words}"):
            planned(schedule=table)
    with pytest.raises(ArgumentError, match=r"schedule='nowhere\.table': write .*zb-v.* the path"):
        planned(schedule="nowhere.table")
    with pytest.raises(StageError, match="4 devices are not shared by 5 ranks in parts that lie"):
        planned(schedule="\n".join(f"{stage}F0 {stage}B0" for stage in range(5)))
    with pytest.raises(StageError, match="3 stages are not 2 on each rank"):
        planned(schedule="zb-v", stages=3, microbatches=4)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Order("table", 4, ("0F0 0B0", "1F0 1B0")), "of 1 microbatches, where"),
        (Order("table", 1, ("0F0 1F0 1B0 0B0",)), "stage 1 is on rank 0, and not"),
        (Order("zb-h1", 4), "two parts, and otherwise in stage 0"),
    ],
)
def test_a_file_whose_schedule_is_of_something_else_is_no_plan(order: Order, words: str) -> None:
    plan = planned(stages=2, microbatches=4, schedule="1f1b")
    broken = in_order(plan, order)
    with pytest.raises(ValueError, match=words):
        broken.check()
    with pytest.raises(PlanError, match=words):
        Plan.from_bytes(broken.to_bytes())


def equal_stages(name: str, ranks: int, microbatches: int, microbatch: MicrobatchTimes) -> Plan:
    """A plan of stages that take equally long, whose messages take no time."""
    one = two_axis_plan()
    part = one.structure.only
    table = Order(name, microbatches).actions(ranks)
    stages = tuple(
        msgspec.structs.replace(
            part,
            microbatches=microbatches,
            is_split=table.is_split,
            start=f"layers.{k}" * bool(k),
            first_rank=table.ranks[k] * part.num_devices,
        )
        for k in range(table.num_stages)
    )
    busy = microbatches * (microbatch.forward_ns + microbatch.backward_ns + microbatch.weights_ns)
    each = msgspec.structs.replace(one.estimates.stages[0], microbatch=microbatch, step_ns=busy)
    structure = redecided(one.structure, stages=stages, schedule=name)
    cluster = hostless("4xH100")
    stages, held = [each] * table.num_stages, [each.memory] * len(table.rows)
    estimates = add_up(table, stages, [1] * table.num_stages, (), (), held, cluster)
    plan = msgspec.structs.replace(one, structure=structure, estimates=estimates)
    return Plan.from_bytes(plan.to_bytes())


def takes(forward: int, backward: int, weights: int) -> MicrobatchTimes:
    return MicrobatchTimes(
        forward, backward, forward, backward, weights_ns=weights, last_weights_ns=weights
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zb_v_has_no_bubble_where_parts_are_equally_long(ranks: int) -> None:
    plan = equal_stages("zb-v", ranks, 2 * ranks, takes(7, 7, 7))
    table = plan.structure.actions
    spans = simulate_pipeline(table, plan.estimates.stages, (), ()).spans
    for row in table.rows:
        assert all(spans[a].end == spans[b].start for a, b in pairwise(row))
    whole = 2 * 2 * ranks * 3 * 7
    assert plan.estimates.step_ns == whole + (ranks - 1) * 7
    assert all(" " not in line.strip() for line in pipeline_content(plan).picture)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("forward", "backward", "weights"), [(3, 3, 3), (5, 4, 3), (4, 6, 2)])
def test_zb_h1_waits_as_long_as_its_paper_says(
    ranks: int, forward: int, backward: int, weights: int
) -> None:
    """(p - 1)(f + b - 2w), where b is both parts: a third of 1F1B's where they are equal."""
    count = 3 * ranks
    plan = equal_stages("zb-h1", ranks, count, takes(forward, backward, weights))
    busy = count * (forward + backward + weights)
    waits = (ranks - 1) * (forward + backward - weights)
    assert plan.estimates.bubble_ns == plan.estimates.step_ns - busy == waits
    whole = equal_stages("1f1b", ranks, count, takes(forward, backward + weights, 0))
    assert whole.estimates.bubble_ns == (ranks - 1) * (forward + backward + weights)


def test_what_an_action_takes_beside_its_ops_counts_in_every_one() -> None:
    microbatch = msgspec.structs.replace(takes(5, 9, 0), action_ns=2)
    plan = equal_stages("1f1b", 4, 8, microbatch)
    assert plan.estimates.step_ns == (8 + 4 - 1) * (5 + 9 + 2 * 2)
    assert plan.estimates.bubble_ns == (4 - 1) * (5 + 9 + 2 * 2)
    assert plan.estimates.exposed_host_ns - plan.stages[0].estimates.exposed_host_ns == 8 * 2 * 2


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("cluster", "launches"), [("2xcpu", 40), ("2xH100", 0)])
def test_an_action_takes_a_cpu_some_calls_of_ops(cluster: str, launches: int) -> None:
    device = parse_cluster(cluster).device
    plan = autopar.plan(*llama(), cluster=cluster, pipeline={"stages": 2}, microbatches=2)
    microbatches = {stage.estimates.microbatch.action_ns for stage in plan.stages}
    assert microbatches == {launches * round(device.launch_s * 1e9)}


def second_stage(others: tuple[Waiting, ...], limit: int | None = None) -> Candidate:
    """The second of two stages, planned on one device while others wait."""
    model, inputs = llama()
    graph = in_microbatches(trace(model, (), inputs).graph, 4)
    stage = in_stages(graph, [cut_at(graph, "model.layers.3")])[1]
    options = make_options(mesh="1", memory={"limit": limit}, backend="eager", microbatches=4)
    asked = make_graph_request(stage, hostless("1xH100"), options)
    in_flight = 1 + max((each.backward for each in others), default=0)
    return best_on(replace(asked, in_flight=in_flight, others=others).on(Mesh(())), silent)


def test_what_waits_for_either_part_is_held() -> None:
    check_waiting((Waiting(1, 1), Waiting(0, 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("others", [(Waiting(2),), (Waiting(0, 3),)], ids=str)
def test_what_waits_for_one_part_alone_is_held(others: tuple[Waiting, ...]) -> None:
    check_waiting(others)


def check_waiting(others: tuple[Waiting, ...]) -> None:
    none = second_stage((Waiting(0),))
    memory = none.estimates.memory
    found = schedule(parse_layout(none.request.step, none.structure))
    layout = parse_layout(none.request.step, none.structure)
    assert found.before is not None
    whole, rest = (
        sum(
            layout.held_bytes(value.ref, value.state)
            for value in values
            if layout.graph.nodes[value.ref.node].role.value == "op"
        )
        for values in (found.before.saved, found.before.carried)
    )
    assert 0 < rest != whole
    held = second_stage(others).estimates.memory
    most = max(each.backward * whole + each.weights * rest for each in others)
    assert held.saved == memory.saved + most
    assert held.transient == memory.transient


@pytest.mark.nightly
def test_what_waits_is_kept_within_the_limit() -> None:
    free = second_stage((Waiting(1, 2),)).estimates.memory
    limit = free.total - free.saved // 8
    found = second_stage((Waiting(1, 2),), limit)
    assert found.is_tight and found.structure.recompute
    assert found.estimates.memory.total <= limit
    assert found.structure.is_split
    step = found.request.step
    assert step.second_part is not None and in_two_parts(step) is not step


def test_orders_that_save_waiting_are_tried_where_ranks_wait() -> None:
    open_options = make_options(pipeline={"stages": "auto"})
    best = PipelineShape(4, 4, "1f1b")
    tried = [(shape.schedule, shape.ranks, shape.microbatches) for shape in
             other_orders(open_options, best, 0.4)]  # fmt: skip
    assert tried == [
        (name, 4, 4) for name in ("interleaved", "eager-1f1b", "gpipe", "zb-h1", "zb-v")
    ]
    busy = other_orders(open_options, best, 0.01)
    assert [shape.schedule for shape in busy] == ["interleaved"]
    asked: list[tuple[dict[str, Any], list[str]]] = [
        ({"stages": 4}, ["eager-1f1b", "gpipe", "zb-h1"]),
        ({"cuts": "layers.1"}, ["eager-1f1b", "gpipe", "zb-h1"]),
        ({"stages": "auto", "schedule": "1f1b"}, []),
    ]
    for given, names in asked:
        options = make_options(**grouped(**given))
        assert [shape.schedule for shape in other_orders(options, best, 0.4)] == names


@pytest.mark.breadth(2)
@pytest.mark.parametrize("bytes_per_s", [5e9, 2e10])
def test_given_stages_are_in_the_shortest_order_where_links_are_slow(bytes_per_s: float) -> None:
    """In 1F1B a rank waits for each send; in others it has begun with more microbatches by then."""
    graph = trace(Chain([512] * 13), (torch.randn(1 << 16, 512),), {}).graph
    wanted = asked(graph, 2, stages=2, microbatches=8)
    slow = Link("slow", bytes_per_s, 1e-5, 0.0, "made up")
    cluster = replace(wanted.cluster, levels=(Level(2, slow),))

    def found(**order: str) -> Plan:
        options = replace(wanted.options, **order)
        return answer(replace(wanted, cluster=cluster, options=options), silent)

    named = {name: found(schedule=name) for name in ("1f1b", "eager-1f1b", "zb-h1", "gpipe")}
    best = min(named.values(), key=lambda plan: plan.estimates.step_ns)
    assert named["eager-1f1b"].estimates.step_ns < 0.9 * named["1f1b"].estimates.step_ns
    assert found().structure == best.structure


@pytest.mark.nightly
def test_what_a_table_has_may_be_said_beside_it() -> None:
    assert planned(schedule=UNSPLIT, stages=2, microbatches=2).structure.num_ranks == 2


@pytest.mark.nightly
def test_what_ranks_do_otherwise_is_told() -> None:
    a = planned(schedule=UNSPLIT)
    b = planned(schedule="0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    topics = {topic.title: topic for topic in compare(a, b).topics}
    (change,) = topics["pipeline"].changes
    assert (change.what, change.before, change.after) == (
        "actions of rank 1", "1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1"
    )  # fmt: skip


def test_fewer_microbatches_follow_the_same_table() -> None:
    """Another call of the model may have a batch that is divided into fewer."""
    structure = planned(schedule=UNSPLIT).structure
    options = make_options(pipeline={"stages": 2}).in_stages_of(structure)
    table = options.actions
    assert table is not None and table == PipelineSchedule.parse(UNSPLIT)
    assert Action.parse("1B1") in table.rows[1]
    assert str(table.first(1)) == "0F0 0B0\n1F0 1B0"
    for name in ("zb-h1", "zb-v", "interleaved:2"):
        found = redecided(structure, schedule=name, schedule_rows=())
        assert options.in_stages_of(found).schedule == name
