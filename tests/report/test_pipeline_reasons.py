"""Why a plan in stages is as it is: of its cuts, of waiting, and of what is in flight."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from expecttest import assert_expected_inline

from autopar.cli.main import main
from autopar.errors import AutoparError, PlanError
from autopar.report.explained import explained
from autopar.report.pipeline_reasons import pipeline_reasons
from autopar.report.printed import plain
from tests.redone import redecided
from tests.report.plans import MIB, MS, Order, staged_plan, two_axis_plan

replace = msgspec.structs.replace


def test_page() -> None:
    assert_expected_inline(
        plain(explained(staged_plan()).page(), 96),
        """\
Toy: the whole plan

What limits the step
  the busiest rank, that of stage 1, works for 125 ms of the step (74.9 %), shares results and
  gradients for 2 ms and waits for 40 ms: 15 ms until the first microbatch comes, 25 ms for the
  others at the end
  of that, messages are under way to it for 5 ms

What each stage has: compute of one microbatch, with nothing sent
  stage  module          number  forward  backward     each   share
  0      model.layers.*       4     4 ms      3 ms  1.75 ms  66.7 %
         lm_head              1     1 ms      2 ms     3 ms  28.6 %
         (model)              1   500 us      0 ns   500 us  4.76 %
  1      model.layers.*       4     4 ms      3 ms  1.75 ms  66.7 %
         lm_head              1     1 ms      2 ms     3 ms  28.6 %
         (model)              1   500 us      0 ns   500 us  4.76 %

Why it is cut so
  with the same work shared evenly among the stages, the step would take 152 ms (-8.98 %)
  moved           from     to       step, about           memory there, about
  model.layers.4  stage 1  stage 0       153 ms  -8.66 %     52 MiB, too much
  model.layers.3  stage 0  stage 1       181 ms  +8.66 %               48 MiB
  with the times that such modules have in these stages, which a search would plan anew

What waiting costs
  microbatches (2 now), all of the same size    step  bubble  tokens/s  most in flight
  4, 2 times the batch                        287 ms  13.9 %     7,135               2
  8, 4 times the batch                        527 ms  7.59 %     7,772               2
  the same batch in more, smaller microbatches is another plan (--microbatches): what a part of
  the rows takes does not follow from this one

What is held in flight
  stage  in flight  saved for each  for all  memory   limit  of the limit
  0              2           6 MiB   12 MiB  40 MiB  50 MiB          80 %
  1              1          12 MiB   12 MiB  41 MiB  50 MiB          82 %

How far the next plan is
  as modelled, the best plan known of another structure takes 34 ms (0.0294 % longer): shards
  the sequence on tp
  fragile: that is less than 0.5 %""",
    )


def test_a_moved_cut_is_played() -> None:
    """Of what a stage computes, its four layers are 8 of 11 ms forward, 6 of 10 backward."""
    plan = staged_plan()
    later, earlier = pipeline_reasons(plan).moved
    assert (later.module, later.loses, later.gains) == ("model.layers.4", 1, 0)
    assert (earlier.module, earlier.loses, earlier.gains) == ("model.layers.3", 0, 1)

    def with_turns(forward: tuple[int, int], backward: tuple[int, int]) -> int:
        """The step as it is played by hand: rank 0, message, rank 1 twice, message, rank 0, what
        all ranks share, the optimizer."""
        first = forward[0] + 5 * MS + 2 * (forward[1] + backward[1])
        return first + 5 * MS + backward[0] + 2 * MS + 5 * MS

    # A layer takes 2/11 of a stage's forward and 3/20 of its backward.
    one = round(10 * MS * 2 / 11), round(20 * MS * 3 / 20)
    two = round(20 * MS * 2 / 11), round(40 * MS * 3 / 20)
    assert later.step_ns == with_turns(
        (10 * MS + one[0], 20 * MS - two[0]), (20 * MS + one[1], 40 * MS - two[1])
    )
    assert earlier.step_ns == with_turns(
        (10 * MS - one[0], 20 * MS + two[0]), (20 * MS - one[1], 40 * MS + two[1])
    )


def test_what_does_not_fit_is_said() -> None:
    """A layer has a quarter of the 24 MiB that parameters take, but for those of the head in the
    last stage; and it saved 3 MiB of each of two microbatches."""
    (later, _) = pipeline_reasons(staged_plan()).moved
    assert later.memory_bytes == (40 + 6 + 2 * 3) * MIB > later.memory_limit_bytes == 50 * MIB
    assert "52 MiB, too much" in str(explained(staged_plan()))


def test_stages_of_whose_cuts_nothing_is_known() -> None:
    plan = staged_plan()
    for start in ("lm_head", "model.layers", "model.layers.9", "model.layers.²", "x." + "9" * 5000):
        stages = plan.structure.stages[0], replace(plan.structure.stages[1], start=start)
        other = replace(plan, structure=redecided(plan.structure, stages=stages))
        assert pipeline_reasons(other).moved == ()
        assert "of other cuts the plan says nothing" in " ".join(str(explained(other)).split())


def test_a_stage_keeps_its_last_module() -> None:
    plan = staged_plan()
    first, second = plan.structure.stages
    params = {n: p for n, p in second.params.items() if n.startswith("model.layers.4.")}
    second = replace(second, params=params)
    found = pipeline_reasons(
        replace(plan, structure=redecided(plan.structure, stages=(first, second)))
    )
    assert [each.module for each in found.moved] == ["model.layers.3"]


def test_more_microbatches_of_the_same_size() -> None:
    found = pipeline_reasons(staged_plan()).batches
    # Each takes 60 ms more on the busiest rank, which it works for.
    assert [(each.microbatches, each.step_ns // MS) for each in found] == [(4, 287), (8, 527)]
    assert [round(each.bubble * each.step_ns) for each in found] == [40 * MS, 40 * MS]
    assert [each.in_flight for each in found] == [(2, 1), (2, 1)]
    assert found[0].tokens_per_s == 2 * 1024 * 10**9 // (287 * MS)
    gpipe = pipeline_reasons(staged_plan(Order("gpipe", 2))).batches
    assert [each.in_flight for each in gpipe] == [(4, 4), (8, 8)]


def test_a_table_is_not_continued() -> None:
    order = Order("table", 2, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    plan = staged_plan(order)
    found = pipeline_reasons(plan)
    assert found.batches == () and found.step_ns == 167 * MS
    assert "does not follow from this one" in " ".join(str(explained(plan)).split())


def test_names_are_those_of_stages() -> None:
    plan = staged_plan()
    assert explained(plan).pipeline == pipeline_reasons(plan)
    found = explained(plan, "lm_head.weight")
    assert found.pipeline is None and found == explained(plan, "lm_head.weight", 1)
    assert found.subject == "lm_head.weight"
    with pytest.raises(PlanError, match=r"mlp is in stages 0, 1: say which \(--stage 0\)"):
        explained(plan, "model.layers.*.mlp")
    assert explained(plan, "model.layers.*.mlp", 0).parts
    with pytest.raises(AutoparError, match="close to it are"):
        explained(plan, "lm_heads")
    with pytest.raises(PlanError, match="no stage 2"):
        explained(plan, "", 2)
    assert plan.explain() == explained(plan)
    assert explained(two_axis_plan()) == two_axis_plan().explain()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def test_command(tmp_path: Path) -> None:
    file = str(tmp_path / "p.json")
    staged_plan().save(file)
    whole = run(file, "--json")
    content = json.loads(whole.stdout)["pipeline"]
    assert (content["step_ns"], content["even_ns"]) == (167 * MS, 152 * MS)
    assert [row["in_flight"] for row in content["stages"]] == [2, 1]
    one = run(file, "--stage", "1")
    assert one.exit_code == 0 and "What a step goes to" in one.stdout
