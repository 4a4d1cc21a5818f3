"""The page of a plan, without a browser: its content, what is inert, and where boxes stand."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx import DiGraph, is_directed_acyclic_graph

from autopar.cli.main import main
from autopar.plans.plan import Plan
from autopar.report.html.block_graph import fold
from autopar.report.html.block_picture import arrange
from autopar.report.html.page import content, html
from autopar.report.html.schedule import CRITICAL
from autopar.report.html.svg import ticks
from tests.report.any_plans import plans
from tests.report.plans import (
    MIB,
    MS,
    half_hidden_plan,
    renamed,
    stepped_plan,
    two_axis_plan,
    undisturbed,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llama-405b.plan.json"
VOID = {"meta", "link", "input"}


class Tree(HTMLParser):
    """Checks that elements are closed in order; what elements, attributes and texts there are."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(page.decode())
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: bytes) -> Tree:
    """What holds of every page."""
    tree = Tree(page)
    assert tree.tags["script"] == tree.tags["style"] == tree.tags["html"] == 1
    for name, value in tree.attributes:
        assert not name.startswith("on") and name != "style", f"{name}={value}"
        if name in ("src", "href", "action", "data", "xlink:href"):
            assert value.startswith(("#", "data:,")), f"{name}={value}"
    assert b"url(" not in page and b"@import" not in page
    assert page.decode().replace("\n", "").isprintable()
    return tree


def test_content() -> None:
    whole = content(stepped_plan())
    head, (page,) = whole.headline, whole.stages
    assert [card.figure for card in head.cards] == [
        "34 ms", "30,117", "31.2 %", "9 ms", "40 MiB", "feasible", "0.0294 %",
    ]  # fmt: skip
    assert sum(warning.startswith("fragile: ") for warning in head.warnings) == 1
    assert [(panel.letter, panel.title, panel.ns) for panel in page.schedule.panels] == [
        ("", "The step", 34 * MS),
        ("A", "model.layers.* forward, once of 4 times", 12 * MS // 4),
        ("B", "model.layers.* backward, once of 4 times", 11 * MS // 4),
    ]
    assert [column.total // MIB for column in page.memory.columns] == [31, 40, 27]
    assert page.memory.held[0].state == "[P on tp, S(0) on dp]"
    totals = [each.total for each in page.traffic]
    assert [(axis.axis, axis.time_ns) for axis in totals] == [("dp", MS), ("tp", 8 * MS)]
    assert [(axis.exposed_ns, axis.hidden_ns) for axis in totals] == [(MS, 0), (8 * MS, 0)]
    kinds = [row.kind for row in page.decisions]
    assert kinds == ["parameter"] * 4 + ["op"] + ["route"]
    assert page.decisions[-1].decision == "[P on tp, S(0) on dp] to [S(0) on dp]"


def test_picture_and_bill_agree() -> None:
    """What the bars of the whole step are filled with is what the bill says of each track."""
    plan = Plan.load(EXAMPLE)
    schedule = content(undisturbed(plan)).stages[0].schedule
    whole = schedule.panels[0]
    drawn = {row.title: sum(block.busy * block.ns for block in row.blocks) for row in whole.rows}
    assert drawn.pop(CRITICAL) == pytest.approx(whole.ns, rel=1e-9)
    estimates = plan.estimates
    expected = {"compute": estimates.compute_ns, "optimizer": estimates.optimizer_ns}
    expected |= {"network dp": 0, "network tp": 0}
    for key, sends in estimates.stages[0].sends.items():
        for each in sends:
            by_device = key in estimates.stages[0].ops or each.kind == "slice"
            expected["compute" if by_device else f"network {each.axis}"] += each.time_ns
    # A device that its links do not slow down waits for the host a little longer.
    assert drawn.pop("host", 0) == pytest.approx(estimates.exposed_host_ns, rel=1e-2)
    assert drawn == pytest.approx(expected, rel=1e-6)
    for run in schedule.runs:
        assert all(ns <= run.ns for ns in run.busy_ns)


def test_the_critical_path_is_drawn_by_the_tracks_it_goes_by() -> None:
    """Of a block of 3 ms, 1/4 ms is a gather, 2 ms are computed and 3/4 ms is a reduction; the last
    gradient alone is waited for, for 5/4 ms behind 6 ms of backward."""
    step, forward, *_ = content(half_hidden_plan()).stages[0].schedule.panels
    path = step.rows[0]
    assert path.title == CRITICAL
    shares = [
        (bar.track.name, round(bar.busy * 12, 3), round(bar.base * 12, 3))
        for bar in path.blocks
        if bar.start_ns == 0
    ]
    assert shares == [("compute", 8, 0), ("network dp", 1, 8), ("network tp", 3, 9)]
    assert [(bar.track.name, bar.ns) for bar in forward.rows[0].blocks] == [
        ("network dp", MS // 4), ("compute", MS // 4), ("compute", MS), ("compute", 3 * MS // 4),
        ("network tp", 3 * MS // 4),
    ]  # fmt: skip


def test_graph_of_a_block() -> None:
    """Boxes for contractions; arrows say what they redistribute; what the block before made comes
    from outside."""
    forward, backward = content(stepped_plan()).stages[0].graphs
    assert (forward.block, forward.phase, forward.count) == ("model.layers.*", "forward", 4)
    assert [(box.module, box.ops) for box in forward.boxes] == [
        ("norm", ("mm",)), ("mlp.up", ("mm",)), ("mlp.down", ("mm",)),
    ]  # fmt: skip
    up = forward.boxes[1]
    assert [(read.name, read.source_state, read.read) for read in up.reads] == [
        ("weight", "[S(0), S(1)]", "[R, S(1)]"),
        ("previous down mm", "[S(0), P]", "[S(0), R]"),
    ]  # fmt: skip
    assert [(arrow.start, arrow.end) for arrow in forward.arrows] == [(1, 2), (0, 2)]
    assert forward.boxes[2].makes[0].sent == ("[S(0), R]",)
    assert [read.name for read in backward.boxes[0].reads] == ["saved down mm"]


def test_a_page_of_126_layers_is_small() -> None:
    page = html(Plan.load(EXAMPLE))
    tree = check(page)
    assert len(page) < 450_000
    assert page == html(Plan.load(EXAMPLE))
    text = " ".join(tree.text)
    for words in (
        "LlamaForCausalLM",
        "126 times",
        "mlp.gate_proj",
        "reduce_scatter",
        "limit 168 GiB",
    ):
        assert words in text


HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=http://x onerror=alert(1)>",
    "{{ 7919*7919 }}{% raw %}",
    "]]></style></title></svg><script>alert(1)</script>",
    "\x1b[31m\u202e\x00\ud7ff\u2028",
    "a" * 10_000,
)


UNSTYLED = {"bar", "cut", "inbox"}
"""What is grouped so, and has the looks of its parts."""


def test_whatever_is_drawn_has_looks_of_its_own() -> None:
    """Without a rule an area of a picture is black."""
    page = html(Plan.load(EXAMPLE))
    styles = set(re.findall(rb"[.]([A-Za-z][\w-]*)", page[: page.index(b"</style>")]))
    scripts = set(re.findall(rb"[.\"']([A-Za-z][\w-]*)", page[page.index(b"<script") :]))
    values = [value for name, value in check(page).attributes if name == "class" and value]
    used = {word for value in values for word in value.split()}
    assert used - {each.decode() for each in styles | scripts} <= UNSTYLED
    assert set(re.findall(rb"var\(--([\w-]+)\)", page)) <= set(re.findall(rb"--([\w-]+):", page))


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(name: str) -> None:
    plain = check(html(renamed(stepped_plan(), "plain")))
    page = html(renamed(stepped_plan(), name))
    tree = check(page)
    assert set(tree.tags) == set(plain.tags)
    assert len(page) < 150_000
    assert b"62710561" not in page


@settings(max_examples=40)
@given(plans())
def test_every_plan_has_a_page(plan: Plan) -> None:
    check(html(plan))


BOXES = st.lists(st.tuples(st.floats(20, 300), st.floats(20, 120)), min_size=1, max_size=12)


@given(BOXES, st.data())
def test_boxes_stand_apart_and_arrows_lead_down(
    sizes: list[tuple[float, float]], data: st.DataObject
) -> None:
    pairs = [(a, b) for b in range(len(sizes)) for a in range(b)]
    arrows = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    placed = arrange(sizes, arrows)
    boxes = [
        (x - width / 2, y, x + width / 2, y + height)
        for (x, y), (width, height) in zip(placed.boxes, sizes, strict=True)
    ]
    for k, (left, top, right, bottom) in enumerate(boxes):
        assert left >= -1e-6 and right <= placed.width + 1e-6 and bottom <= placed.height + 1e-6
        for other in boxes[:k]:
            beside = right <= other[0] or other[2] <= left
            assert beside or bottom <= other[1] or other[3] <= top
    for (start, end), way in zip(arrows, placed.arrows, strict=True):
        assert way[0] == (placed.boxes[start][0], boxes[start][3]) and way[-1] == placed.boxes[end]
        assert all(a[1] <= b[1] for a, b in pairwise(way))


@given(st.lists(st.sampled_from("xy") | st.none(), min_size=1, max_size=9), st.data())
def test_folding_makes_no_cycle(kinds: list[str | None], data: st.DataObject) -> None:
    nodes = [(str(k), kind) for k, kind in enumerate(kinds)]
    pairs = [(str(a), str(b)) for b in range(len(kinds)) for a in range(b)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    wires = [(a, b, data.draw(st.booleans())) for a, b in chosen]
    groups = fold(nodes, wires)
    assert sorted(name for group in groups for name in group) == sorted(name for name, _ in nodes)
    home = {name: k for k, group in enumerate(groups) for name in group}
    for a, b, vanishes in wires:
        assert vanishes or home[a] != home[b], "what redistributes stays between boxes"
    for group in groups:
        assert len({dict(nodes)[name] for name in group}) == 1
        assert len(group) == 1 or dict(nodes)[group[0]] is not None
    left = DiGraph((home[a], home[b]) for a, b, _ in wires if home[a] != home[b])
    assert is_directed_acyclic_graph(left)
    if all(kind == "x" for kind in kinds) and all(vanishes for *_, vanishes in wires):
        assert not left.edges, "nothing is left to fold"


@given(st.floats(1e-3, 1e18))
def test_ticks_are_few_and_round(end: float) -> None:
    marks = ticks(end)
    assert 3 <= len(marks) <= 10 and marks[0] == 0 and marks[-1] <= end * (1 + 1e-9)


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    stepped_plan().save(file)
    page, trace = tmp_path / "plan.html", tmp_path / "plan.trace.json"
    run = CliRunner().invoke(main, ["report", str(file), "-o", str(page), "--trace", str(trace)])
    assert run.exit_code == 0 and run.stdout == "" and "plan.html" in run.stderr
    assert page.read_bytes() == html(stepped_plan())
    assert trace.read_bytes().startswith(b'{"displayTimeUnit"')
    assert {path.name for path in tmp_path.iterdir()} == {file.name, page.name, trace.name}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "say what to write: -o PAGE, --trace TRACE, or both"),
        (["-o", "nowhere/plan.html"], "cannot write nowhere/plan.html: No such file or directory"),
    ],
)
def test_command_complains(
    options: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two_axis_plan().save("plan.json")
    run = CliRunner().invoke(main, ["report", "plan.json", *options])
    assert run.exit_code == 1 and complaint in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_no_torch_is_imported(tmp_path: Path) -> None:
    page, trace = str(tmp_path / "plan.html"), str(tmp_path / "plan.trace.json")
    code = f"""
import sys
from autopar.cli.main import main
try:
    main(["report", {str(EXAMPLE)!r}, "-o", {page!r}, "--trace", {trace!r}])
except SystemExit as done:
    assert not done.code
assert not {{"torch", "numpy", "transformers"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
