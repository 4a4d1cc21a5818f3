"""`autopar check`: golden plans planned again, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from autopar.cli.main import main
from autopar.cluster.parsing import parse_cluster
from autopar.driver.gate.golden import Check, _compared
from autopar.errors import PlanError
from autopar.plans.plan import Plan
from autopar.plans.provenance import INTERRUPTED
from autopar.plans.requests.constraints import parse_pins
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions, SearchOptions
from autopar.plans.requests.request import GraphRequest, make_graph_request, source_digest
from tests.graphs import linear_step
from tests.report.plans import two_axis_plan

pytestmark = pytest.mark.processes

TARGET = """
import os
import torch
from torch import nn
from width import WIDTH

print("noise on standard output")

def build():
    layers = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64))
    return layers, lambda batch: (torch.zeros(batch, 64),)

def twisted():
    from autopar.rules.table import OPS
    del OPS["aten.relu.default"]
    return build()

def fails(): raise RuntimeError("no such file")
def dies(): os._exit(3)
"""


def recipe(function: str = "build", **options: object) -> str:
    given = {"target": f"model.py:{function}", "cluster": "lab.toml", "global_batch": 32} | options
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two targets of one name, each with a module beside it, also of one name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, width in (("plans", 256), ("others", 512)):
        path = tmp_path / name
        path.mkdir()
        (path / "model.py").write_text(TARGET)
        (path / "width.py").write_text(f"WIDTH = {width}")
        (path / "lab.toml").write_text('device = "A100"\nlevels = [{size = 4}]\n')
        (path / "toy.toml").write_text(recipe())
    return tmp_path / "plans"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", "-j", "2", "--width", "300", *map(str, arguments)])


def statuses(result: Result) -> list[str]:
    return [outcome["status"] for outcome in json.loads(result.stdout)["outcomes"]]


def test_a_golden_plan_is_missing_made_kept_and_updated(folder: Path) -> None:
    golden = folder / "toy.plan.json"
    missing = run(folder)
    assert missing.exit_code == 2
    assert "there is no toy.plan.json: --update makes it" in " ".join(missing.stdout.split())
    assert not golden.exists()

    made = run(folder, folder.parent / "others", "--update", "--json")
    assert (made.exit_code, statuses(made)) == (0, ["created", "created"]), made.stdout
    shapes = [
        Plan.load(place / "toy.plan.json").structure.params["0.weight"].shape
        for place in (folder, folder.parent / "others")
    ]
    assert shapes == [(256, 64), (512, 64)]

    before = golden.read_bytes()
    again = run(folder, "--update")
    assert (again.exit_code, golden.read_bytes()) == (0, before)
    assert again.stdout.endswith("1 plan: 1 same; 1 solved before\n")
    assert "solved before" not in run(folder, "--no-cache").stdout

    (folder / "width.py").write_text("WIDTH = 320")
    different = run(folder)
    assert different.exit_code == 2
    assert "~  0.weight  float32[256, 64] -> float32[320, 64]" in different.stdout
    assert golden.read_bytes() == before
    assert run(folder, "--fail-over", "time=500%,memory=500%").exit_code == 0
    markdown = run(folder, "--format", "md")
    assert markdown.exit_code == 2
    assert markdown.stdout.startswith("<!-- autopar-check:v1 -->\n\n**Plans changed**: 1 different")
    assert "float32&#91;320, 64&#93;" in markdown.stdout

    updated = run(folder, "--update")
    assert updated.exit_code == 0
    assert "1 plan: 1 updated" in updated.stdout
    assert golden.read_bytes() != before
    assert run(folder).exit_code == 0


@pytest.mark.filterwarnings("always::autopar.errors.AutoparWarning")
def test_one_that_fails_does_not_stop_the_others(folder: Path) -> None:
    for name in ("fails", "dies"):
        (folder / f"{name}.toml").write_text(recipe(name))
    (folder / "odd.toml").write_text(recipe(batch=3))
    (folder / "twisted.toml").write_text(recipe("twisted"))
    result = run(folder, "--update", "--json")
    found = {Path(o["name"]).name: o for o in json.loads(result.stdout)["outcomes"]}
    assert result.exit_code == 1
    assert {name: o["status"] for name, o in found.items()} == {
        "dies": "error", "fails": "error", "odd": "error", "toy": "created", "twisted": "created",
    }  # fmt: skip
    assert "ended with status 3" in found["dies"]["message"]
    assert "fails() failed" in found["fails"]["message"]
    assert "unknown field `batch`" in found["odd"]["message"]
    assert "aten.relu.default" in found["twisted"]["warnings"][0]
    assert f"autopar: warning: {folder / 'twisted'}: " in result.stderr


def test_damaged_entries_of_the_cache_are_ignored(folder: Path) -> None:
    assert run(folder, "--update").exit_code == 0
    entries = list((folder.parent / "cache").rglob("*.plan.json"))
    assert len(entries) == 1
    good = entries[0].read_bytes()
    entries[0].write_bytes(good[:-20])
    result = run(folder)
    assert result.exit_code == 0
    assert "solved before" not in result.stdout
    assert entries[0].read_bytes() == good, "it is written anew"


def errors(result: Result, words: str) -> None:
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr


def test_folders_that_make_no_sense(folder: Path, tmp_path: Path) -> None:
    errors(run(tmp_path / "none"), "is no folder of golden plans")
    errors(run(tmp_path), "has no .toml file")
    errors(run(folder, "--fail-over", "x"), "fail-over")
    two_axis_plan().save(folder / "stray.plan.json")
    errors(run(folder), "there is no stray.toml beside it")


def test_a_damaged_golden_plan_is_an_error_until_it_is_written_anew(tmp_path: Path) -> None:
    golden, plan = tmp_path / "toy.plan.json", two_axis_plan()
    golden.write_text("<<<<<<< HEAD")
    with pytest.raises(PlanError, match="not a plan"):
        _compared("toy", golden, plan, Check())
    assert _compared("toy", golden, plan, Check(update=True, allow_gap=True)).status == "created"
    assert Plan.load(golden) == plan


def test_the_best_plan_so_far_is_no_golden_plan(tmp_path: Path) -> None:
    plan, golden = two_axis_plan(), tmp_path / "a.plan.json"
    status = msgspec.structs.replace(plan.provenance, status=INTERRUPTED)
    msgspec.structs.replace(plan, provenance=status).save(golden)
    with pytest.raises(PlanError, match="interrupted: --update"):
        _compared("a", golden, plan, Check())
    assert _compared("a", golden, plan, Check(update=True, allow_gap=True)).status == "created"
    assert not Plan.load(golden).provenance.is_interrupted


def test_a_plan_with_a_gap_is_not_written(tmp_path: Path) -> None:
    golden = tmp_path / "toy.plan.json"
    with pytest.raises(PlanError, match=r"not proven optimal \(gap 2\.94 %\).*--allow-gap"):
        _compared("toy", golden, two_axis_plan(), Check(update=True))
    assert not golden.exists()
    assert _compared("toy", golden, two_axis_plan(), Check(update=True, allow_gap=True))
    assert golden.exists()


def test_what_decides_a_plan_is_in_its_digest() -> None:
    """One thing after the other is changed; no two digests are equal."""
    asked = make_graph_request(linear_step(8, 8, 8), parse_cluster("4xA100"), Options())
    device = replace(asked.cluster.device, launch_s=1e-9)
    others: Sequence[GraphRequest] = (
        replace(asked, graph=replace(asked.graph, name="Other")),
        replace(asked, graph=replace(asked.graph, nodes=asked.graph.nodes[:-1])),
        replace(asked, cluster=parse_cluster("4xH100")),
        replace(asked, cluster=replace(asked.cluster, device=device)),
        replace(asked, options=Options(mesh="4")),
        replace(asked, options=Options(memory_limit_bytes=2**30)),
        replace(asked, options=Options(PlanOptions(optimizer="sgd"))),
        replace(asked, options=Options(constraints=parse_pins(["*=R"]))),
        replace(asked, options=Options(PlanOptions(search=SearchOptions(strict=True)))),
    )
    assert len({each.digest() for each in (asked, *others)}) == len(others) + 1
    assert replace(asked, options=Options()).digest() == asked.digest()


def test_an_edit_of_autopar_is_in_the_digest_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    first = source_digest(tmp_path)
    source_digest.cache_clear()
    (tmp_path / "a.py").write_text("x = 2")
    second = source_digest(tmp_path)
    source_digest.cache_clear()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, source_digest(tmp_path)}) == 3
