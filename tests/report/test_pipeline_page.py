"""The page of all stages of a pipeline, without a browser."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.ir.pipeline import Pass
from autopar.plans.estimates import MicrobatchTimes
from autopar.plans.plan import Plan
from autopar.report.html.page import MAX_STAGES, content, html
from autopar.report.html.pipeline_part import MAX_ACTION_BARS, SHARED, PipelinePart
from autopar.report.html.schedule import ActionTrack
from autopar.report.timeline import UPDATE
from autopar.report.waits import MAX_RANKS
from tests.redone import redecided, repriced
from tests.report.plans import MIB, MS, Order, renamed, staged_plan, stepped_plan
from tests.report.test_html import HOSTILE, check

replace = msgspec.structs.replace
INTERLEAVED = Order("interleaved:2", 2)


def part_of(plan: Plan) -> PipelinePart:
    part = content(plan).pipeline
    assert part is not None
    return part


def test_headline() -> None:
    head = content(staged_plan()).headline
    assert [(card.title, card.figure) for card in head.cards] == [
        ("Step", "167 ms"),
        ("Tokens per second", "30,117"),
        ("Model FLOPs utilisation", "31.2 %"),
        ("Exposed communication", "9 ms"),
        ("Schedule", "1f1b"),
        ("Bubble of the busiest rank", "24 %"),
        ("Memory at the peak", "41 MiB"),
        ("Cuts", "feasible"),
        ("Margin", "0.0294 %"),
    ]
    assert head.cards[6].notes == ("of 50 MiB (82 %)", "stage 1, the fullest")
    assert head.shares[-1].title == "waiting for other stages" and head.shares[-1].ns == 40 * MS
    assert head.subtitle == "2x4xA100, 16 devices: 2 stages"
    binds = head.facts["What binds"]
    assert "that of stage 1, works for 125 ms" in binds[0] and "stage 1 holds most" in binds[1]


def test_every_action_is_a_bar_where_it_is() -> None:
    part = part_of(staged_plan())
    first, second = part.panel.rows
    assert (first.title, second.title, part.panel.ns) == ("stage 0", "stage 1", 167 * MS)
    bars = [(bar.track, bar.start_ns // MS, bar.end_ns // MS, bar.labels) for bar in first.blocks]
    forward, backward = ActionTrack(Pass.FORWARD, 0), ActionTrack(Pass.BACKWARD, 0)
    assert bars == [
        (forward, 0, 10, ("0",)), (forward, 10, 20, ("1",)),
        (backward, 80, 100, ("0",)), (backward, 140, 160, ("1",)),
        (SHARED, 160, 162, ("shared",)), (UPDATE, 162, 167, ("optimizer",)),
    ]  # fmt: skip
    assert first.blocks[3].tip == (
        "0B1: backward, microbatch 1, stage 0\nfrom 140 ms, for 20 ms\n"
        "its rank waits 40 ms for what 1B1 sends, 5 ms of it while that is under way"
    )
    assert "waits" not in first.blocks[0].tip and second.blocks[-1].track is UPDATE


def test_gradients_of_parameters_have_a_colour_of_their_own() -> None:
    plan = staged_plan(Order("zb-h1", 2))
    part = part_of(plan)
    assert part.passes == (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS)
    tracks = {bar.track for row in part.panel.rows for bar in row.blocks}
    assert tracks == {SHARED, UPDATE, *(ActionTrack(kind, 0) for kind in Pass)}
    page = html(plan).decode()
    assert page.count('class="bar weights"') == 4 + 1, "four actions and the legend"
    assert "gradients of parameters, microbatch 1, stage 1" in page
    assert 'class="bar weights"' not in html(staged_plan()).decode()


def test_stages_of_one_rank_differ_in_shade() -> None:
    part = part_of(staged_plan(INTERLEAVED))
    row = part.panel.rows[1]
    assert row.title == "rank 1: 1, 3"
    labels = {bar.labels[0]: bar.track for bar in row.blocks}
    assert labels["1F0"] == ActionTrack(Pass.FORWARD, 0) and labels["3F0"] == ActionTrack(
        Pass.FORWARD, 1
    )
    page = html(staged_plan(INTERLEAVED)).decode()
    assert page.count('class="bar forward later"') == 4
    assert "another shade" in page and "another shade" not in html(staged_plan()).decode()


def test_thin_bars_are_drawn_together() -> None:
    """As high as their shares, which are all there is; what is far apart stays apart."""
    part = part_of(staged_plan(Order("1f1b", 400), ranks=4))
    bars = [bar for row in part.panel.rows for bar in row.blocks]
    assert len(bars) < 1.5 * MAX_ACTION_BARS and max(bar.count for bar in bars) > 1
    for rank, row in zip(part.content.ranks, part.panel.rows, strict=True):
        drawn = sum(bar.busy * bar.ns for bar in row.blocks)
        assert drawn == pytest.approx(rank.busy_ns + rank.shared_ns, rel=1e-9)
        tops: dict[int, float] = {}
        for bar in row.blocks:
            assert bar.base == pytest.approx(tops.get(bar.start_ns, 0.0))
            tops[bar.start_ns] = bar.base + bar.busy
        assert max(tops.values()) <= 1 + 1e-9
    widest = max((bar for bar in bars if bar.count > 1), key=lambda bar: bar.ns)
    assert widest.ns < part.panel.ns / 60


def test_thin_bars_that_are_far_apart_stay_apart() -> None:
    plan = staged_plan(Order("1f1b", 8))
    first, second = plan.estimates.stages
    thin = replace(first, microbatch=MicrobatchTimes(1000, 1000, 1000, 1000, 1000))
    plan = replace(plan, estimates=repriced(plan.estimates, stages=(thin, second)))
    part = part_of(plan)
    row = part.panel.rows[0]
    assert all(bar.ns < part.panel.ns / 100 for bar in row.blocks)
    assert len({bar.start_ns for bar in row.blocks if isinstance(bar.track, ActionTrack)}) == 9


def test_memory_is_drawn_against_the_limit() -> None:
    part = part_of(staged_plan())
    assert [(title, use.peak // MIB) for title, use in part.memory] == [
        ("stage 0", 40), ("stage 1", 41)
    ]  # fmt: skip
    page = html(staged_plan()).decode()
    memory = page.partition('<section id="memory">')[2].partition("</section>")[0]
    assert memory.count('class="limit"') == 2 and memory.count('class="area saved"') == 2 + 1


def test_each_stage_is_on_the_page() -> None:
    page = html(staged_plan())
    tree = check(page)
    ids = [value for name, value in tree.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for name, value in tree.attributes if name == "href" and value[0] == "#"}
    assert targets <= set(ids)
    for k in range(2):
        names = ("schedule", "memory", "communication", "blocks", "decisions")
        assert {f"stage{k}", *(f"stage{k}-{name}" for name in names)} <= set(ids)
    text = " ".join(tree.text)
    assert "from model.layers.4 on, devices 8-15, dp=2,tp=4" in text
    assert page == html(staged_plan())


def test_a_page_has_room_for_so_many_stages_and_ranks() -> None:
    ranks = MAX_RANKS + 2
    plan = staged_plan(Order(), ranks)
    assert (part_of(plan).num_left_out, len(part_of(plan).panel.rows)) == (2, MAX_RANKS)
    page = html(plan).decode()
    assert page.count('<details class="stage"') == MAX_STAGES
    assert f"--stage {MAX_STAGES} to {ranks - 1}" in page and "2 more ranks" in page


def test_all_stages_on_one_rank() -> None:
    tree = check(html(staged_plan(INTERLEAVED, ranks=1)))
    assert "rank 0: 0, 1" in tree.text


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(name: str) -> None:
    def hostile(name: str) -> Plan:
        plan, one = staged_plan(), renamed(stepped_plan(), name)
        stages = tuple(
            replace(one.structure.only, start=name, first_rank=stage.first_rank)
            for stage in plan.structure.stages
        )
        structure = redecided(
            plan.structure, stages=stages, model=name, inputs=(name,), cluster=name
        )
        microbatches = (each.microbatch for each in plan.estimates.stages)
        each = tuple(
            replace(one.estimates.stages[0], microbatch=microbatch) for microbatch in microbatches
        )
        estimates = repriced(plan.estimates, stages=each, cluster=one.estimates.cluster)
        return replace(plan, structure=structure, estimates=estimates, provenance=one.provenance)

    tree = check(html(hostile(name)))
    assert set(tree.tags) == set(check(html(hostile("plain"))).tags)


def test_command(tmp_path: Path) -> None:
    file, page = tmp_path / "p.json", tmp_path / "p.html"
    staged_plan().save(file)
    run = CliRunner().invoke(main, ["report", str(file), "-o", str(page)])
    assert (run.exit_code, run.stdout) == (0, "") and page.read_bytes() == html(staged_plan())
    run = CliRunner().invoke(main, ["report", str(file), "--stage", "1", "-o", str(page)])
    assert run.exit_code == 0 and page.read_bytes() == html(staged_plan(), 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-o", "."], "cannot write .: Is a directory"),
        (["-o", "nowhere/p.html"], "cannot write nowhere/p.html: No such file or directory"),
        (["--trace", "t.json"], "the plan has 2 stages: say which (--stage 0 to 1)"),
        (["-o", "p.html", "--trace", "t.json"], "say which (--stage 0 to 1)"),
    ],
)
def test_command_complains(
    options: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    staged_plan().save("p.json")
    run = CliRunner().invoke(main, ["report", "p.json", *options])
    assert run.exit_code == 1 and complaint in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
