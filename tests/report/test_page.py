"""The page of a plan."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from autopar.ir.mesh import Axis, Mesh
from autopar.ir.sharding import Sharding
from autopar.plans.estimates import CollectiveTotal, OpTotal
from autopar.plans.plan import Plan
from autopar.plans.requests.matching import general
from autopar.plans.structure import Param
from autopar.report.names import MAX_NAME, clean
from autopar.report.placed import on_axes, param_groups
from autopar.report.stage_content import MAX_ROWS, StageContent
from autopar.report.summary import summarize
from autopar.report.verification import page as verification_page
from autopar.runtime.simulator.comparison import Report, Unequal
from tests.redone import redecided, repriced
from tests.report.any_plans import plans
from tests.report.plans import half_hidden_plan, renamed, two_axis_plan


def stage_shown(plan: Plan) -> StageContent:
    found = summarize(plan).stage
    assert found is not None
    return found


def printed(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_page() -> None:
    assert_expected_inline(
        printed(summarize(two_axis_plan()).page(), width=96),
        """\
model    Toy, trained with adamw
input    input_ids: int64[8, 128]
cluster  2x4xA100, 8 devices: dp=2,tp=4
step     31 ms: compute 21 ms, exposed communication 6 ms, optimizer 4 ms, hidden communication
         3 ms
memory   40 MiB of 50 MiB (80 %)
proof    feasible: 34 ms as modelled, proven bound 33 ms, gap 2.94 %
search   2 candidates: 1 planned, 1 not better
plan     a3130d86538caa4c67d286d16ae25bfe (autopar 0.1.0, torch 2.13.0, HiGHS 1.15.1)

Blocks: time, hidden communication too, and saved memory of all of them together
  module          count  forward  backward  communication  optimizer   saved
  model.layers.*      4     8 ms      6 ms           8 ms       4 ms  12 MiB
    mlp               4     7 ms      6 ms           8 ms       4 ms  12 MiB
    norm              4     1 ms      0 ns           0 ns       0 ns     0 B
  lm_head             1     2 ms      4 ms           1 ms       0 ns     0 B
  (model)             1     1 ms      0 ns           0 ns       0 ns     0 B

Top costs: all of a kind together, share of the step with nothing hidden
  what       where                    phase     count  time   share
  mm         model.layers.*.mlp.down  backward      4  6 ms  17.6 %
  optimizer  (model)                                1  4 ms  11.8 %
  mm         lm_head                  backward      1  4 ms  11.8 %
  mm         model.layers.*.mlp.up    forward       4  4 ms  11.8 %
  mm         model.layers.*.mlp.down  forward       4  3 ms  8.82 %
  mm         lm_head                  forward       1  2 ms  5.88 %
  mm         (model)                  forward       1  1 ms  2.94 %
  mm         model.layers.*.norm      forward       4  1 ms  2.94 %

Critical path: what the step takes its time for, all of a kind together
  not known: the plan does not say in which order its step does what

Communication by axis: time if nothing ran beside it; exposed is what of that costs the device
  axis  over  time  exposed   hidden
  tp          8 ms  5.33 ms  2.67 ms
  dp          1 ms   667 us   333 us

Parameters
  parameter                           count  local bytes     shape  stored; for backward
  lm_head.weight                          1      256 KiB  256x4097  [S(1) on tp, S(1) on dp]
  model.layers.*.mlp.up.weight            4      256 KiB  256x1024  [S(1) on tp, S(0) on dp]
                                                                    backward: [S(1) on tp]
  model.layers.{1-3}.mlp.down.weight      3      384 KiB  1024x256  [S(0) on tp]
  model.layers.0.mlp.down.weight          1      512 KiB  1024x256  replicated

Communication: all collectives of a step
  axis  kind        phase     count  local bytes  time
  tp    all_reduce  backward      4        8 MiB  5 ms
  tp    all_reduce  forward       4        8 MiB  3 ms
  dp    all_gather  forward       4        2 MiB  1 ms

Memory per device at the peak
  held by                          bytes  of the limit
  parameters                       4 MiB           8 %
  gradients                        4 MiB           8 %
  optimizer states                16 MiB          32 %
  unsharded parameters             1 MiB           2 %
  activations saved for backward  12 MiB          24 %
  all else that is live            3 MiB           6 %
  together                        40 MiB          80 %

warning: mylib.twist.default: no sharding rule, so every device computes all of it; a record in
autopar/rules describes an op
warning: every device holds 512 KiB of parameters whole, model.layers.0.mlp.down.weight the
largest (512 KiB)
warning: not proven optimal: as modelled, a plan up to 2.94 % faster may exist""",
    )


def test_page_tells_what_the_step_waits_for() -> None:
    page = printed(summarize(half_hidden_plan()).page())
    assert_expected_inline(
        page[page.index("Critical path") : page.index("Parameters")],
        """\
Critical path: what the step takes its time for, all of a kind together
  what              where               phase     count     time   share
  compute           model.layers.*      forward      12     8 ms  26.4 %
  compute           model.layers.*      backward      4     6 ms  19.8 %
  optimizer         (model)                           1     4 ms  13.2 %
  compute           lm_head             backward      1     4 ms  13.2 %
  all_reduce on tp  model.layers.*.mlp  forward       4     3 ms  9.92 %
  compute           lm_head             forward       1     2 ms  6.61 %
  all_reduce on tp  model.layers.*.mlp  backward      1  1.25 ms  4.13 %
  compute           (model)             forward       1     1 ms  3.31 %
  ... and 1 more (--json lists all)

Communication by axis: time if nothing ran beside it; exposed is what of that costs the device
  axis  over  time  exposed   hidden
  tp          8 ms  4.25 ms  3.75 ms
  dp          1 ms     1 ms     0 ns

""",
    )


def test_page_of_one_device() -> None:
    plan = two_axis_plan()
    param = Param((256,), "float32", "[]", "[]")
    structure = redecided(plan.structure, axes=(), params={"w": param}, replicated_unknown_ops=())
    estimates = repriced(plan.estimates, collectives=())
    provenance = msgspec.structs.replace(plan.provenance, gap_ppm=0, status="optimal")
    plan = msgspec.structs.replace(
        plan, structure=structure, estimates=estimates, provenance=provenance
    )
    text = printed(summarize(plan).page())
    assert "cluster  2x4xA100, 1 device\n" in text
    assert "optimal: 34 ms" in text
    assert "warning" not in text
    assert "none" in text.partition("Communication")[2]


@settings(max_examples=30)
@given(plan=plans(), width=st.integers(40, 200))
def test_every_plan_prints_within_the_width(plan: Plan, width: int) -> None:
    for line in printed(summarize(plan).page(), width).split("\n"):
        assert line.isprintable()
        assert cell_len(line) <= width


@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "a\nb", "a\rb", "\x9b31m", "\u202egnp", "[red]x[/]", "[/]", ":smile:"]
)
def test_names_cannot_command_the_terminal_or_the_markup(name: str) -> None:
    text = printed(summarize(renamed(two_axis_plan(), name)).page(), width=400)
    assert all(c.isprintable() for line in text.split("\n") for c in line)
    assert f"model    {clean(name)}, trained with {clean(name)}\n" in text


def test_long_names_are_cut() -> None:
    assert len(clean("x" * 10**6)) == MAX_NAME
    assert clean("x" * MAX_NAME) == "x" * MAX_NAME


def test_long_tables_are_cut_and_say_so() -> None:
    plan = two_axis_plan()
    many = tuple(
        CollectiveTotal("all_reduce", f"a{i}", "forward", 1, 1, 1) for i in range(MAX_ROWS + 7)
    )
    estimates = repriced(plan.estimates, collectives=many)
    plan = msgspec.structs.replace(plan, estimates=estimates)
    assert "... and 7 more" in printed(summarize(plan).page())


def test_blocks_add_up() -> None:
    plan = two_axis_plan()
    blocks = stage_shown(plan).blocks
    ops = plan.estimates.stages[0].ops.values()
    assert sum(b.forward_ns + b.backward_ns for b in blocks) == sum(op.compute_ns for op in ops)
    assert sum(b.communication_ns for b in blocks) == sum(op.communication_ns for op in ops)
    assert sum(b.optimizer_ns for b in blocks) == plan.estimates.optimizer_ns
    assert sum(b.saved_bytes for b in blocks) == sum(op.saved_bytes for op in ops)
    for block in blocks:
        if block.parts:
            assert sum(part.total_ns for part in block.parts) == block.total_ns


def test_blocks_do_not_depend_on_the_order_of_ops() -> None:
    plan = two_axis_plan()
    estimates = repriced(plan.estimates, ops=dict(reversed(plan.estimates.stages[0].ops.items())))
    assert summarize(msgspec.structs.replace(plan, estimates=estimates)) == summarize(plan)


def test_params_add_up() -> None:
    plan = two_axis_plan()
    groups = stage_shown(plan).params
    assert sum(group.count for group in groups) == len(plan.structure.params)
    head = next(group for group in groups if group.name == "lm_head.weight")
    # 4,097 columns over 8 ranks: the largest shard has 513
    assert (head.total_bytes, head.local_bytes) == (256 * 4097 * 2, 256 * 513 * 2)


def test_groups_tell_apart_what_lies_differently() -> None:
    mesh = Mesh((Axis("tp", 2),))
    split, whole = (Param((4,), "float32", s, s) for s in ("[S(0)]", "[R]"))
    params = {f"h.{i}.w": whole if i == 2 else split for i in range(5)}
    assert [g.name for g in param_groups(params, mesh)] == ["h.{0-1,3-4}.w", "h.2.w"]
    assert [g.name for g in param_groups(dict.fromkeys(params, split), mesh)] == ["h.*.w"]


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        ("[R, R]", "replicated"),
        ("[S(0), R]", "[S(0) on dp]"),
        ("[S(0), S(1)]", "[S(1) on tp, S(0) on dp]"),
        ("[R, S(1.1)]", "[S(1.1) on tp]"),
    ],
)
def test_named_axes(sharding: str, text: str) -> None:
    mesh = Mesh((Axis("dp", 2), Axis("tp", 4)))
    assert on_axes(Sharding.parse(sharding), mesh) == text


def test_patterns() -> None:
    assert general("layers.10.mlp.w1") == "layers.*.mlp.w1"


def test_block_outside_of_a_repetition_stands_for_itself() -> None:
    plan = two_axis_plan()
    ops = {"a": OpTotal("encoder.conv", "aten.add", "forward", 1, 5, 0, 0, 0)}
    estimates = repriced(plan.estimates, ops=ops)
    (block,) = stage_shown(msgspec.structs.replace(plan, estimates=estimates)).blocks
    assert (block.module, block.parts) == ("encoder.conv", ())


def test_verification_page_puts_what_failed_first() -> None:
    differences = (
        Unequal("loss:0", 1e-12, 3.0),
        Unequal("grad:a", 1e-11, 1.0),
        Unequal("grad:\x1bb", float("inf"), 1.0),
    )
    report = Report("Toy", "0" * 32, 4, "float64", 1e-9, 0, differences)
    lines = printed(verification_page(report)).splitlines()
    assert lines[2].split()[0] == "grad:\\x1bb"
    assert lines[-1].startswith("1 of 3 tensors differ, 4 ranks against eager, float64")


def test_difference_that_is_not_a_number_fails() -> None:
    report = Report("", "", 1, "float64", 1e-9, 0, (Unequal("loss:0", float("nan"), 1.0),))
    assert len(report.failed) == 1
