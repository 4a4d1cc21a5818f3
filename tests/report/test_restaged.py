"""What `diff` tells of plans in stages, and of microbatches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autopar.plans.estimates import Memory
from autopar.plans.plan import Plan
from autopar.plans.structure import MeshAxis
from autopar.report.difference import compare
from autopar.report.printed import plain
from autopar.report.verdict import DIFFERENT, SAME, judge
from tests.redone import redecided, repriced
from tests.report.plans import MIB, MS, Order, in_order, staged_plan, stepped_plan, two_axis_plan
from tests.report.plans import with_stage as replaced

replace = msgspec.structs.replace
OLD = staged_plan()


def found(new: Plan, old: Plan = OLD) -> list[tuple[str, str, str, str]]:
    return [
        (topic.title, change.what, change.before, change.after)
        for topic in compare(old, new).topics
        for change in topic.changes
    ]


def with_stage(number: int, **fields: Any) -> Plan:
    stages = list(OLD.structure.stages)
    stages[number] = replace(stages[number], **fields)
    return replace(OLD, structure=redecided(OLD.structure, stages=tuple(stages)))


def test_the_same() -> None:
    assert judge(compare(OLD, OLD)).status == SAME and found(OLD) == []


def test_what_the_pipeline_decides() -> None:
    assert found(with_stage(1, start="model.layers.5")) == [
        (
            "pipeline",
            "stages begin with",
            "(first), model.layers.4",
            "(first), model.layers.5",
        )
    ]
    assert found(with_stage(1, first_rank=4)) == [("pipeline", "first devices", "0, 8", "0, 4")]
    assert found(in_order(OLD, Order("gpipe", 4))) == [
        ("pipeline", "schedule", "1f1b", "gpipe"),
        ("pipeline", "microbatches", "2", "4"),
    ]
    rows = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"
    tables = rows, ("0F0 0F1 0B1 0B0", rows[1])
    old, new = (in_order(OLD, Order("table", 2, each)) for each in tables)
    assert found(new, old) == [("pipeline", "actions of rank 0", rows[0], "0F0 0F1 0B1 0B0")]


def test_what_a_stage_decides() -> None:
    new = with_stage(0, axes=(MeshAxis("dp", 4), MeshAxis("tp", 2)))
    assert found(new) == [("stage 0: mesh", "mesh", "dp=2,tp=4", "dp=4,tp=2")]
    assert judge(compare(OLD, new)).status == DIFFERENT


def test_another_number_of_stages() -> None:
    new = staged_plan(Order("interleaved:2", 2))
    changes = {(topic, what): (before, after) for topic, what, before, after in found(new)}
    assert changes["pipeline", "meshes of stages"] == (
        "dp=2,tp=4, dp=2,tp=4", ", ".join(["dp=2,tp=4"] * 4)
    )  # fmt: skip
    assert changes["pipeline", "schedule"][1] == "interleaved:2"
    shown = plain(judge(compare(OLD, new)).page(), 120)
    assert "stage 3, peak" in shown and "stage 0, forward of one" in shown


def test_parameters_of_all_stages_are_the_model() -> None:
    params = dict(OLD.structure.stages[1].params)
    del params["lm_head.weight"]
    assert (
        "parameters that are new or gone",
        "lm_head.weight",
        "bfloat16[256, 4097]",
        "",
    ) in found(with_stage(1, params=params))
    # A parameter that another stage has now is where it was, as to the model.
    moved = with_stage(0, params={**OLD.structure.stages[0].params, **params})
    assert not any("new or gone" in title for title, *_ in found(moved))


def test_one_stage_against_several() -> None:
    """Ops of stages are not those of the model: they are not said to be gone."""
    topics = {title for title, *_ in found(OLD, stepped_plan())}
    assert "ops that are new or gone" not in topics and "pipeline" in topics


def test_another_graph_of_stages() -> None:
    """Nothing is said of ops, which are not compared."""
    new = replace(OLD, structure=redecided(OLD.structure, fingerprint="e" * 32))
    difference = compare(OLD, new)
    assert [topic.title for topic in difference.topics] == ["fingerprint"]
    assert not any("its ops and parameters are the same" in note for note in difference.notes)
    plain_plan = two_axis_plan()
    other = replace(plain_plan, structure=redecided(plain_plan.structure, fingerprint="e" * 32))
    notes = compare(plain_plan, other).notes
    assert any("its ops and parameters are the same" in note for note in notes)


def test_the_bill_has_both_parts_of_backward() -> None:
    """What a whole backward takes is not what the first part of one takes."""
    first, second = OLD.estimates.stages
    split = replace(
        second, microbatch=replace(second.microbatch, backward_ns=30 * MS, weights_ns=10 * MS)
    )
    estimates = repriced(OLD.estimates, stages=(first, split))
    difference = compare(OLD, replace(OLD, estimates=estimates))
    figures = {figure.name: (figure.before, figure.after) for figure in difference.costs}
    assert figures["stage 1, backward of one"] == (40 * MS, 30 * MS)
    assert figures["stage 1, weights of one"] == (None, 10 * MS)
    assert "stage 0, weights of one" not in figures


def test_the_bill_has_the_stages() -> None:
    first, second = OLD.estimates.stages
    longer = replace(
        second, step_ns=131 * MS, microbatch=replace(second.microbatch, backward_ns=43 * MS),
        memory=replace(second.memory, transient=9 * MIB),
    )  # fmt: skip
    estimates = repriced(
        OLD.estimates, stages=(first, longer), step_ns=171 * MS, bubble_ns=46 * MS,
        memory=longer.memory,
    )  # fmt: skip
    difference = compare(OLD, replace(OLD, estimates=estimates))
    figures = {figure.name: (figure.before, figure.after) for figure in difference.costs}
    assert figures["waiting for other stages"] == (40 * MS, 46 * MS)
    assert figures["stage 1, all microbatches"] == (125 * MS, 131 * MS)
    assert figures["stage 1, backward of one"] == (40 * MS, 43 * MS)
    assert figures["stage 0, peak"] == (40 * MIB, 40 * MIB)
    verdict = judge(difference)
    assert verdict.status == DIFFERENT and "stage 1, all microbatches" in verdict.reasons[0]
    order = [figure.name for figure in difference.costs if figure.section == "stages"]
    assert [name.split(",")[0] for name in order] == ["stage 0"] * 4 + ["stage 1"] * 4
    rows = [line.split() for line in plain(verdict.page()).splitlines() if "stage 1, peak" in line]
    assert rows == [["stage", "1,", "peak", "41", "MiB", "46", "MiB", "+12.2", "%"]]


def test_a_plan_of_one_stage_has_no_bill_of_stages() -> None:
    old = stepped_plan()
    memory = Memory(1, 1, 1, 1, 1, 1)
    new = replace(old, estimates=repriced(old.estimates, memory=memory))
    assert {figure.section for figure in compare(old, new).costs}.isdisjoint({"stages"})
    assert "waiting for other stages" not in plain(judge(compare(old, new)).page())


@pytest.mark.parametrize(
    ("field", "what"), [("microbatches", "microbatches"), ("loss_chunks", "chunks of losses")]
)
def test_microbatches_of_one_stage(field: str, what: str) -> None:
    old = two_axis_plan()
    new = replaced(old, **{field: 4})
    assert found(new, old) == [("pipeline", what, "1", "4")]
