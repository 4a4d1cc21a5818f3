"""The page of a pipeline, the pages of its stages, and files that are none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.errors import PlanError
from autopar.ir.pipeline import Action, ActionSpan, ActionTable
from autopar.plans.estimates import Delay, TurnTimes
from autopar.plans.pipelines import play_pipeline
from autopar.plans.plan import PipelineSchedule, Plan, Stage
from autopar.report.pipeline import PipelineSummary, draw, summarize_pipeline
from autopar.report.shown import shown, stage_of
from tests.report.plans import two_axis_plan

replace = msgspec.structs.replace


def pipeline(schedule: PipelineSchedule | None = None) -> Plan:
    """Two stages on eight devices each, of which the second takes twice as long."""
    one = two_axis_plan()
    stages = (Stage("", 0, one.structure), Stage("layers.4", 8, one.structure))
    turns = (TurnTimes(10, 20, 10, 20, 5), TurnTimes(20, 40, 20, 40, 5))
    each = tuple(replace(one.estimates, turn=turn) for turn in turns)
    order = schedule or PipelineSchedule("1f1b", 2)
    structure = replace(
        one.structure, stages=stages, schedule=order, axes=(), params={}, ops={}, routes={}
    )
    delays = (Delay(0, 1, "forward", 1024, 5), Delay(1, 0, "backward", 1024, 5))
    bare = {"ops": {}, "sends": {}, "order": (), "step_ns": 150}
    return replace(
        one,
        structure=structure,
        estimates=replace(one.estimates, stages=each, delays=delays, **bare),
    )


def test_who_waits_for_whom() -> None:
    found = shown(pipeline())
    assert isinstance(found, PipelineSummary) and found == summarize_pipeline(pipeline())
    assert [(row.rank, row.first_device, row.in_flight) for row in found.stages] == [
        (0, 0, 2), (1, 8, 1)
    ]  # fmt: skip
    # 60 of 150 ns, and 120.
    assert [round(row.idle, 3) for row in found.stages] == [0.6, 0.2]
    text = str(found)
    assert "layers.4" in text and "8-15" in text and "0-7" in text
    assert "2 stages, 1f1b of 2 microbatches" in text


def test_the_picture_has_each_action_where_it_is() -> None:
    table = ActionTable.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    spans = {
        Action.parse(text): ActionSpan(*span)
        for text, span in {
            "0F0": (0, 1), "0F1": (1, 2), "0B0": (3, 4), "0B1": (5, 6),
            "1F0": (1, 2), "1B0": (2, 3), "1F1": (3, 4), "1B1": (4, 5),
        }.items()
    }  # fmt: skip
    assert draw(table, spans, 6) == ("01 a b", " 0a1b ")
    assert draw(table, spans, 12) == ("0011  aa  bb", "  00aa11bb  ")


def test_a_person_can_tell_the_two_parts_of_backward_apart() -> None:
    own = PipelineSchedule(microbatches=2, is_split=True)
    plan = pipeline(PipelineSchedule("zb-h1", 2))
    part = replace(plan.structure.stages[0].structure, schedule=own)
    stages = tuple(replace(stage, structure=part) for stage in plan.structure.stages)
    turn = TurnTimes(10, 10, 10, 10, 0, weights_ns=10, last_weights_ns=10)
    estimates = tuple(replace(each, turn=turn) for each in plan.estimates.stages)
    plan = replace(
        plan,
        structure=replace(plan.structure, stages=stages),
        estimates=replace(plan.estimates, stages=estimates, delays=()),
    )
    plan.check()
    found = summarize_pipeline(plan)
    assert found.is_split and [row.weights_ns for row in found.stages] == [10, 10]
    table = plan.structure.schedule.made(2)
    spans = play_pipeline(table, estimates, ()).spans
    assert draw(table, spans, 7) == ("01 aAbB", " 0a1bAB")
    text = " ".join(str(found).split())
    assert "weights" in text and "gradients of parameters in capitals" in text
    assert "in capitals" not in str(summarize_pipeline(pipeline()))


def test_a_stage_is_a_plan(tmp_path: Path) -> None:
    plan = pipeline()
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == plan and plan.world_size == 16
    assert stage_of(plan, 1).structure == two_axis_plan().structure
    with pytest.raises(PlanError, match=r"has 2 stages: say which \(--stage 0 to 1\)"):
        stage_of(plan, None)
    with pytest.raises(PlanError, match="no stage 2: the plan has 2 stages, 0 to 1"):
        stage_of(plan, 2)
    with pytest.raises(PlanError, match="no stage 0: the plan has no stages"):
        stage_of(two_axis_plan(), 0)
    run = CliRunner().invoke
    whole = run(main, ["show", str(tmp_path / "p.json")])
    assert whole.exit_code == 0 and "Between stages" in whole.stdout
    one = run(main, ["show", str(tmp_path / "p.json"), "--stage", "0"])
    assert one.exit_code == 0 and "Between stages" not in one.stdout
    report = run(main, ["report", str(tmp_path / "p.json"), "-o", str(tmp_path / "p.html")])
    assert report.exit_code == 1 and "say which" in report.stderr


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (PipelineSchedule("2f2b", 2), "no schedule is called '2f2b'"),
        (PipelineSchedule("interleaved", 2, 2), "there are 2, the schedule has 4"),
        (PipelineSchedule("zb-h1", 2), "backward comes in two parts"),
        (PipelineSchedule("1f1b", 1_000_000), "at most 2000000 items"),
        (PipelineSchedule("table", 1, table=("0F0 0B0", "1B0 1F0")), "wait for each other"),
    ],
)
def test_what_is_no_schedule_is_no_plan(schedule: PipelineSchedule, words: str) -> None:
    plan = pipeline(schedule)
    if schedule.microbatches == 1_000_000:
        plan = replace(plan, structure=replace(plan.structure, stages=3 * plan.structure.stages))
    with pytest.raises(ValueError, match=words):
        plan.check()
