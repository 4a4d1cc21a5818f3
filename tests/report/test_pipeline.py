"""The page of a pipeline, the pages of its stages, and files that are none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from expecttest import assert_expected_inline

from autopar.cli.main import main
from autopar.errors import PlanError
from autopar.ir.graph import Phase
from autopar.ir.pipeline import Action, ActionSpan, PipelineSchedule
from autopar.plans.estimates import Memory
from autopar.plans.plan import Plan, stage_of
from autopar.report.pipeline import (
    busiest_text,
    pipeline_content,
    simulated_plan,
)
from autopar.report.printed import plain
from autopar.report.summary import summarize
from autopar.report.waits import draw, exposed_ns
from tests.redone import redecided, repriced
from tests.report.plans import MIB, MS, Order, in_order, staged_plan, two_axis_plan, with_stage

replace = msgspec.structs.replace
INTERLEAVED = Order("interleaved:2", 2)


def test_page() -> None:
    found = summarize(staged_plan())
    assert found == summarize(staged_plan()) and found.stage is None
    assert_expected_inline(
        plain(found.page(), 96),
        """\
model     Toy, trained with adamw
input     input_ids: int64[8, 128]
cluster   2x4xA100, 16 devices
pipeline  2 stages, 1f1b of 2 microbatches
step      167 ms: compute 21 ms, exposed communication 9 ms, optimizer 4 ms, waiting for other
          stages 40 ms
speed     30,117 tokens/s, 31.2 % of the devices' peak FLOP/s
memory    41 MiB of 50 MiB (82 %)
binds     the busiest rank, that of stage 1, works for 125 ms of the step (74.9 %), shares
          results and gradients for 2 ms and waits for 40 ms: 15 ms until the first microbatch
          comes, 25 ms for the others at the end
cuts      feasible: 34 ms as modelled, proven bound 33 ms, gap 2.94 %, of the times of segments
          under one plan of the whole model
margin    as modelled, the best plan known of another structure takes 34 ms (0.0294 % longer):
          shards the sequence on tp
search    2 candidates: 1 planned, 1 not better
plan      7fd299a7c490e2c4e41c80fe6b84843b (autopar 0.1.0, torch 2.13.0, HiGHS 1.15.1)

Stages: forward and backward of one microbatch
  stage  begins with    devices  mesh       params  forward  backward    idle  in flight  memory
  0      (first)        0-7      dp=2,tp=4       8    10 ms     20 ms  59.9 %          2  40 MiB
  1      model.layers.  8-15     dp=2,tp=4       9    20 ms     40 ms    24 %          1  41 MiB
         4

Step: microbatches forward (digits) and backward (letters) through each rank
  000011111                           aaaaaaaaa                  bbbbbbbbb
         000000000aaaaaaaaaaaaaaaaaa111111111bbbbbbbbbbbbbbbbbb

Between stages, for each microbatch: bytes of a device, and how long they are under way; exposed
is what receivers stand still for of that, in a step
  from  to  phase     bytes  time  exposed
  0     1   forward   1 MiB  5 ms     5 ms
  1     0   backward  1 MiB  5 ms    10 ms

At the end of a step: what ranks share once all microbatches are done, bytes of a device
  what     ranks  messages  bytes  time
  results  0, 1          1    4 B  2 ms

warning: stages 0, 1: mylib.twist.default: no sharding rule, so every device computes all of it;
a record in autopar/rules describes an op
warning: stage 0: every device holds 512 KiB of parameters whole, model.layers.0.mlp.down.weight
the largest (512 KiB)
warning: stage 1: every device holds 512 KiB of parameters whole, model.layers.4.mlp.down.weight
the largest (512 KiB)
warning: fragile: as modelled, a plan of another structure is 0.029 % slower: shards the
sequence on tp""",
    )


def test_who_waits_for_whom() -> None:
    """Rank 0 has 30 ms of each microbatch, rank 1 60; messages take 5."""
    _, played, ranks = simulated_plan(staged_plan())
    first, second = ranks
    assert (first.busy_ns, first.before_ns, first.between_ns, first.behind_ns) == (
        65 * MS, 0, 100 * MS, 0
    )  # fmt: skip
    assert (second.busy_ns, second.before_ns, second.between_ns, second.behind_ns) == (
        125 * MS, 15 * MS, 0, 25 * MS
    )  # fmt: skip
    # Stage 1 is over with microbatch 0 after 75 ms, and with microbatch 1 after 135.
    waits = [
        (str(a.action), str(a.after), a.waited_ns, a.sent_ns) for a in first.actions if a.after
    ]
    assert waits == [("0B0", "1B0", 60 * MS, 5 * MS), ("0B1", "1B1", 40 * MS, 5 * MS)]
    assert exposed_ns(ranks) == {
        (1, 0, Phase.BACKWARD): 10 * MS, (0, 1, Phase.FORWARD): 5 * MS
    }  # fmt: skip
    assert busiest_text(ranks, played.step_ns) == (
        "the busiest rank, that of stage 1, works for 125 ms of the step (74.9 %), shares results "
        "and gradients for 2 ms and waits for 40 ms: 15 ms until the first microbatch comes, 25 ms "
        "for the others at the end"
    )


def test_what_a_rank_does_is_all_there_is() -> None:
    """Work and waiting of every rank are the step."""
    for schedule, ranks in (
        (Order("gpipe", 3), 3), (Order("1f1b", 5), 4), (INTERLEAVED, 2),
        (INTERLEAVED, 1),
    ):  # fmt: skip
        _, played, simulated = simulated_plan(staged_plan(schedule, ranks))
        for rank in simulated:
            assert rank.busy_ns + rank.shared_ns + rank.waits_ns == played.step_ns
            assert sum(each.waited_ns for each in rank.actions) == rank.before_ns + rank.between_ns
            assert all((each.after is None) == (each.waited_ns == 0) for each in rank.actions)


def test_two_stages_on_each_rank() -> None:
    plan = staged_plan(INTERLEAVED)
    found = pipeline_content(plan)
    assert [(row.stage, row.rank, row.devices) for row in found.stages] == [
        (0, 0, "0-7"), (1, 1, "8-15"), (2, 0, "0-7"), (3, 1, "8-15")
    ]  # fmt: skip
    assert [rank.stages for rank in found.ranks] == [(0, 2), (1, 3)]
    assert summarize(plan).world_size == 16
    assert "that of stages 1, 3, works" in found.binds[0]


def test_memory_is_that_of_a_device() -> None:
    """Of all its stages together; what plans of earlier versions do not say is no more than each
    stage has at its own fullest moment."""
    plan = staged_plan(INTERLEAVED)
    old = pipeline_content(plan)
    own = [each.memory.total for each in plan.estimates.stages]
    assert [row.memory.total for row in old.ranks] == [own[0] + own[2], own[1] + own[3]]
    devices = (Memory(6 * MIB, 2 * MIB, 0, 1 * MIB, 4 * MIB, 3 * MIB), Memory(MIB, 0, 0, 0, 0, 0))
    estimates = repriced(plan.estimates, devices=devices, memory=devices[0])
    plan = replace(plan, estimates=estimates)
    found = pipeline_content(plan)
    assert [row.memory_bytes // MIB for row in found.stages] == [16, 1, 16, 1]
    assert summarize(plan).memory_bytes == 16 * MIB
    assert "a device with stages 0, 2 holds most, at the peak 16 MiB" in found.binds[1]
    page = plain(summarize(plan).page(), 96).split("Memory of a device: ")[1].split("\n\n")[0]
    assert page.splitlines()[1:] == [
        "  rank  stages  always there  saved  temporary  memory  of the limit",
        "  0     0, 2           8 MiB  5 MiB      3 MiB  16 MiB          32 %",
        "  1     1, 3           1 MiB    0 B        0 B   1 MiB           2 %",
    ]
    assert "Memory of a device: " not in plain(summarize(staged_plan()).page(), 96)


def test_all_stages_on_one_rank() -> None:
    """Nobody waits, and nothing is under way."""
    plan = staged_plan(INTERLEAVED, ranks=1)
    assert plan.world_size == 8
    found = pipeline_content(plan)
    assert [row.idle for row in found.stages] == [0, 0]
    assert plan.estimates.bubble_ns == 0
    assert found.binds[0].endswith("of the step (100 %) and waits for nobody")
    assert all(row.exposed_ns == 0 for row in found.sends)
    assert "0-7" in str(summarize(plan))


def test_one_device_each() -> None:
    plan = staged_plan()
    stages = tuple(
        replace(stage, first_rank=k, axes=(), params={})
        for k, stage in enumerate(plan.structure.stages)
    )
    plan = replace(plan, structure=redecided(plan.structure, stages=stages))
    assert [row.devices for row in pipeline_content(plan).stages] == ["0", "1"]


def test_warnings_of_stages_are_told_once() -> None:
    found = summarize(staged_plan()).warnings
    assert sum("mylib.twist.default: no sharding rule" in text for text in found) == 1
    assert any(text.startswith("stages 0, 1: ") for text in found)
    assert "warning: stages 0, 1: " in str(summarize(staged_plan()))


def test_the_picture_has_each_action_where_it_is() -> None:
    table = PipelineSchedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    spans = {
        Action.parse(text): ActionSpan(*span)
        for text, span in {
            "0F0": (0, 1), "0F1": (1, 2), "0B0": (3, 4), "0B1": (5, 6),
            "1F0": (1, 2), "1B0": (2, 3), "1F1": (3, 4), "1B1": (4, 5),
        }.items()
    }  # fmt: skip
    assert draw(table, spans, 6) == ("01 a b", " 0a1b ")
    assert draw(table, spans, 12) == ("0011  aa  bb", "  00aa11bb  ")


def test_gradients_of_parameters_have_marks_of_their_own() -> None:
    plan = staged_plan(Order("zb-h1", 2))
    found = pipeline_content(plan)
    assert found.is_split and {*"".join(found.picture)} == {*" 01abAB"}
    assert "gradients of parameters in capitals" in plain(summarize(plan).page(), 200)


def test_a_stage_is_a_plan(tmp_path: Path) -> None:
    plan = staged_plan()
    file = str(tmp_path / "p.json")
    plan.save(file)
    assert Plan.load(file) == plan and plan.world_size == 16
    assert stage_of(plan, 1).structure == plan.structure.stages[1]
    with pytest.raises(PlanError, match=r"has 2 stages: say which \(--stage 0 to 1\)"):
        stage_of(plan, None)
    with pytest.raises(PlanError, match="no stage 2: the plan has 2 stages, 0 to 1"):
        stage_of(plan, 2)
    with pytest.raises(PlanError, match="no stage 1: the plan has one stage, 0"):
        stage_of(two_axis_plan(), 1)
    assert stage_of(two_axis_plan(), None) == stage_of(two_axis_plan(), 0)
    run = CliRunner().invoke
    whole = run(main, ["show", file])
    assert whole.exit_code == 0 and "Between stages" in whole.stdout
    one = run(main, ["show", file, "--stage", "0"])
    assert one.exit_code == 0 and "Top costs" in one.stdout and "Top costs" not in whole.stdout


@pytest.mark.parametrize("command", ["show", "explain", "report"])
def test_no_such_stage(command: str, tmp_path: Path) -> None:
    staged_plan().save(tmp_path / "p.json")
    page = tmp_path / "p.html"
    more = ["-o", str(page)] if command == "report" else []
    for stage, words in (("2", "no stage 2: the plan has 2 stages"), ("-1", "'--stage'")):
        arguments = [command, str(tmp_path / "p.json"), "--stage", stage, *more]
        run = CliRunner().invoke(main, arguments)
        assert (run.exit_code, run.stdout) == (1, "") and words in run.stderr
    assert not page.exists()


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Order("2f2b", 2), "no schedule is called '2f2b'"),
        (Order("interleaved:2", 2), "there are 2, the schedule has 4"),
        (Order("zb-h1", 2), "backward comes in two parts"),
        (Order("1f1b", 1_000_000), "at most 2000000 items"),
        (Order("table", 1, ("0F0 0B0", "1B0 1F0")), "wait for each other"),
    ],
)
def test_what_is_no_schedule_is_no_plan(schedule: Order, words: str) -> None:
    plan = in_order(staged_plan(), schedule)
    if schedule.microbatches == 1_000_000:
        plan = replace(plan, structure=redecided(plan.structure, stages=3 * plan.structure.stages))
    with pytest.raises(ValueError, match=words):
        plan.check()


def test_one_stage_lays_out_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may say a million microbatches, whose table would take seconds."""

    def laid_out(*_: object) -> PipelineSchedule:
        raise AssertionError("a table was made")

    monkeypatch.setattr("autopar.plans.structure.named_schedule", laid_out)
    plan = with_stage(two_axis_plan(), microbatches=1_000_000)
    plan.check()
    assert plan.structure.mesh_text == "dp=2,tp=4"
    for wrong in ({"first_rank": 1}, {"is_split": True}):
        with pytest.raises(ValueError, match="one stage begins with the first rank"):
            with_stage(two_axis_plan(), **wrong).check()
