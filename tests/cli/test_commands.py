"""Parsing, errors and exit statuses of the command line."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from autopar.cli.main import main
from autopar.errors import (
    AutoparError,
    InfeasibleError,
    InterruptedSearchWarning,
    PlanMismatchError,
    TraceError,
    UnknownOpWarning,
    VerificationError,
)
from autopar.plans.plan import Plan
from autopar.plans.provenance import INTERRUPTED
from autopar.plans.requests.read_options import make_options
from tests.report.plans import renamed, two_axis_plan

COMPILE = importlib.import_module("autopar.driver.api")

TARGET = """
import torch

def build():
    return torch.nn.Linear(4, 2), (torch.zeros(8, 4),)

def sized():
    return torch.nn.Linear(4, 2), lambda batch: (torch.randint(0, 9, (batch, 4)),)

def nothing(): pass
def one(): return torch.nn.Linear(4, 2)
def no_model(): return 1, 2
def no_inputs(): return torch.nn.Linear(4, 2), 3
def fails(): raise RuntimeError("no such file\\nor anything")
value = 3
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "target_under_test.py"
    path.write_text(TARGET)
    return str(path)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    two_axis_plan().save(path)
    return str(path)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, dict[str, object]]]:
    """What the command asked the planner for; the planner answers with a plan made by hand."""
    calls: list[tuple[object, dict[str, object]]] = []

    def plan(model: object, inputs: object, **options: object) -> object:
        calls.append((inputs, options))
        return two_axis_plan()

    monkeypatch.setattr(COMPILE, "plan", plan)
    return calls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def fails(result: Result, status: int, message: str) -> None:
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("autopar: error: "), result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_show_prints_the_page_and_nothing_else(plan_file: str) -> None:
    result = run("show", plan_file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("model    Toy, trained with adamw\n")
    assert "\x1b" not in result.stdout
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def test_a_table_that_is_none_is_told_before_anything_is_planned(tmp_path: Path) -> None:
    own = tmp_path / "own.table"
    own.write_text("0F0 0B0\n1B0 1F0\n")
    given = ("plan", "nowhere.py:build", "--pipeline-schedule")
    fails(run(*given, str(own)), 1, "schedule: the ranks wait for each other")
    own.write_text("0F0 0B0\n1F0 1B0\n")
    fails(run(*given, str(own), "--pipeline-stages", "3"), 1, "stages=3: the table has 2")
    fails(run(*given, "zb-h3"), 1, "schedule='zb-h3': write")


def test_show_json_has_the_figures_of_the_page(plan_file: str) -> None:
    content = json.loads(run("show", plan_file, "--json").stdout)
    assert content["world_size"] == 8
    assert content["memory_bytes"] == 40 * 2**20
    assert content["stage"]["blocks"][0]["module"] == "model.layers.*"


@pytest.mark.parametrize("width", [40, 77, 200])
def test_width(plan_file: str, width: int) -> None:
    lines = run("show", plan_file, "--width", str(width)).stdout.splitlines()
    assert width - 15 < max(map(len, lines)) <= width or width == 200


def test_no_color_holds_where_colour_is_forced(
    plan_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[36m" in run("show", plan_file).stdout
    assert "\x1b[36m" not in run("show", plan_file, "--no-color").stdout


def test_show_needs_no_torch_and_runs_no_code_of_a_user(plan_file: str, tmp_path: Path) -> None:
    two = tmp_path / "evil.json"
    renamed(two_axis_plan(), "__import__('os').abort()").save(two)
    code = f"""
import sys
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect", "pickle.find_class"):
        raise SystemError(event)
sys.addaudithook(hook)
from autopar.cli.main import main
for file in ({plan_file!r}, {str(two)!r}):
    try:
        main(["show", file])
    except SystemExit as stop:
        assert stop.code == 0
assert not {{"torch", "numpy", "transformers"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_command_prints_the_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "Usage: autopar" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "Missing argument 'FILE'"),
        (["shwo"], "No such command 'shwo'"),
        (["show", "x", "--widht", "3"], "--widht"),
        (["plan", "t.py:build", "--cluster", "8xH1000"], "H1000"),
        (["plan", "t.py:build", "--cluster", "4xcpu", "--memory-limit", "72"], "has no unit"),
        (["plan", "t.py:build", "--cluster", "4xcpu", "--frontier", "8,4"], "has no unit"),
        (
            ["plan", "t.py:build", "--cluster", "4xcpu", "--search-time-limit", "0"],
            "--search-time-limit",
        ),
        (["plan", "t.py:build", "--cluster", "4xcpu", "--global-batch", "0"], "--global-batch"),
        (["plan", "nofunction", "--cluster", "4xcpu"], "names no function"),
        (["plan", "none.py:build", "--cluster", "4xcpu"], "there is no file none.py"),
        (["plan", "no_such_package.x:build", "--cluster", "4xcpu"], "No module named"),
        (["verify", "nowhere.json", "t.py:build"], "cannot read plan nowhere.json"),
        (["show", "."], "Is a directory"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    fails(run(*arguments), 1, message)


def test_what_is_no_cluster_and_no_profile(target: str, tmp_path: Path) -> None:
    """A list of hosts, devices of two kinds, a trace: a sentence each, and status 1."""
    hosts, trace = tmp_path / "hostfile.txt", tmp_path / "trace.json"
    hosts.write_text("worker-1 slots=8\nworker-2 slots=8\n")
    trace.write_text('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}')
    function = f"{target}:build"
    for given, words in (
        (str(hosts), "is a hostfile of 2 hosts with 8 slots"),
        (str(trace), "a trace of one run"),
        ("2xL4+2xA10G", "Plan for each kind by itself (2xL4 and 2xA10G)"),
        ("node[01-04]", "is a list of 4 hosts"),
        ("topo.txt", "is no cluster, and no file"),
    ):
        fails(run("plan", function, "--cluster", given), 1, words)
    for file, words in ((hosts, "is a hostfile"), (trace, "a trace of one run")):
        fails(run("plan", function, "--cluster", "4xcpu", "--profile", str(file)), 1, words)


def test_the_remedy_for_an_unknown_device_works(target: str, tmp_path: Path) -> None:
    """The lines of the message are a file that one plans with."""
    function = f"{target}:build"
    result = run("plan", function, "--cluster", "2x4xH999")
    fails(result, 1, "unknown device 'H999'")
    lines = [line.strip() for line in result.stderr.splitlines() if " = " in line]
    path = tmp_path / "h999.toml"
    path.write_text("\n".join(lines))
    result = run("plan", function, "--cluster", str(path), "--mesh", "2x4")
    assert result.exit_code == 0, result.stderr
    assert "h999, 8 devices" in result.stdout


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("buidl", "has no 'buidl'; it defines build, sized"),
        ("value", "is a int, not a function"),
        ("nothing", "nothing() returned nothing: it must return (model, inputs)"),
        ("one", "one() returned a Linear: it must"),
        ("no_model", "no_model() returned a int for a model"),
        ("no_inputs", "no_inputs() returned a int for inputs"),
        ("fails", "fails() failed on the meta device"),
        ("sized", "the inputs of sized() depend on the batch: give --global-batch"),
    ],
)
def test_wrong_targets(target: str, function: str, message: str) -> None:
    fails(run("plan", f"{target}:{function}", "--cluster", "4xcpu"), 1, message)


def test_batch_for_fixed_inputs(target: str) -> None:
    result = run("plan", f"{target}:build", "--cluster", "4xcpu", "--global-batch", "8")
    fails(result, 1, "build() returned inputs of a fixed size")


@pytest.mark.parametrize("source", ["1 / 0", "import sys; sys.exit(3)", "def (", "import nope"])
def test_file_that_cannot_be_imported(tmp_path: Path, source: str) -> None:
    path = tmp_path / "broken_target.py"
    path.write_text(source)
    fails(run("plan", f"{path}:build", "--cluster", "4xcpu"), 1, f"importing {path} failed: ")
    assert "broken_target" not in sys.modules


def test_file_named_like_a_module_does_not_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("value = 1")
    fails(run("plan", f"{path}:value", "--cluster", "4xcpu"), 1, "is a int, not a function")
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--constraints-pin", "weight"), "pin weight: 'weight' is not PATTERN=SHARDING"),
        (("--constraints-forbid", "tp"), "forbid tp: this is not AXIS:PATTERN"),
        (("--constraints-strategy", "zero"), "there is no strategy 'zero': choose ddp, fsdp"),
    ],
)
def test_what_is_imposed_is_read_before_the_target(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    fails(run("plan", f"{tmp_path}/none.py:build", "--cluster", "4xcpu", *arguments), 1, words)


def test_plan_asks_for_what_was_said(
    target: str, planned: list[tuple[object, dict[str, object]]], tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    result = run(
        "plan", f"{target}:sized", "--cluster", "2x4xA100", "--mesh", "dp=2,tp=4", "--global-batch",
        "16", "--memory-limit", "30GiB", "--memory-host", "1TiB", "--optimizer", "sgd",
        "--search-time-limit", "1.5", "--search-strict",
        "--constraints-pin", "weight=S(0) on tp", "--constraints-pin", "bias=R",
        "--constraints-forbid", "dp:weight",
        "--constraints-strategy", "megatron", "-o", str(output),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout == run("show", str(output)).stdout
    ((inputs, options),) = planned
    assert isinstance(inputs, tuple)
    assert (inputs[0].shape, inputs[0].device.type) == ((16, 4), "meta")
    assert options.pop("cluster").name == "2x4xA100"  # type: ignore[attr-defined]
    options.pop("progress")
    made = make_options(**{k: v for k, v in options.items() if k != "profile"})
    assert options["profile"] is None
    assert made == make_options(
        mesh="dp=2,tp=4",
        optimizer="sgd",
        memory={"limit": 30 * 2**30, "host": 2**40},
        constraints={
            "pins": ["weight=S(0) on tp", "bias=R"], "forbid": "dp:weight", "strategy": "megatron",
        },
        search={"time_limit": 1.5, "margin": True, "strict": True},
    )  # fmt: skip


def test_plan_json_is_alone_on_standard_output(target: str, planned: list[object]) -> None:
    result = run("plan", f"{target}:build", "--cluster", "4xcpu", "--json")
    assert json.loads(result.stdout)["model"] == "Toy"
    assert result.stderr == ""


def test_output_that_cannot_be_written(target: str, planned: list[object]) -> None:
    result = run("plan", f"{target}:build", "--cluster", "4xcpu", "-o", "/nowhere/plan.json")
    fails(result, 1, "cannot write plan /nowhere/plan.json: No such file")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AutoparError("broken"), 1),
        (TraceError("broken"), 1),
        (InfeasibleError("broken"), 3),
        (VerificationError("broken"), 4),
        (PlanMismatchError("broken"), 5),
        (ZeroDivisionError("broken"), 1),
        (AutoparError("broken \x1b[31m"), 1),
    ],
)
def test_statuses(
    target: str, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def plan(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(COMPILE, "plan", plan)
    command = ("plan", f"{target}:build", "--cluster", "4xcpu")
    result = run(*command)
    fails(result, status, "broken")
    assert "\x1b" not in result.stderr
    assert "Traceback" in run(*command, "--debug").stderr


def test_frontier_prints_and_writes_its_pages(target: str, tmp_path: Path) -> None:
    page = tmp_path / "frontier.html"
    command = ("plan", f"{target}:build", "--cluster", "2xcpu", "--frontier", "1,2KiB,1B")
    result = run(*command, "-o", str(page))
    assert result.exit_code == 0, result.stderr
    assert result.stderr == f"wrote {page} ({page.stat().st_size:,} bytes)\n"
    assert "Memory limits, per device" in result.stdout
    written = page.read_text()
    assert "<svg" in written and "<script" not in written and "no plan" in written
    content = json.loads(run(*command, "--json").stdout)
    assert [rung["limit_bytes"] for rung in content["rungs"]] == [2048, 1024, 1]
    assert content["rungs"][0]["plan"]["peak_bytes"] <= 2048
    assert content["rungs"][2]["plan"] is None


def test_interrupt(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMPILE, "plan", plan)
    assert run("plan", f"{target}:build", "--cluster", "4xcpu").exit_code == 130


@pytest.mark.filterwarnings("always::autopar.errors.InterruptedSearchWarning")
def test_the_best_plan_so_far_is_shown_and_saved(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = two_axis_plan()
    status = msgspec.structs.replace(whole.provenance, status=INTERRUPTED, bound_ns=0)

    def plan(*_: object, **__: object) -> object:
        warnings.warn("the search was interrupted", InterruptedSearchWarning, stacklevel=2)
        return msgspec.structs.replace(whole, provenance=status)

    monkeypatch.setattr(COMPILE, "plan", plan)
    command = ("plan", f"{target}:build", "--cluster", "4xcpu")
    result = run(*command, "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 130
    assert result.stderr == "autopar: warning: the search was interrupted\n"
    assert "as modelled, nothing is known of how good the best plan is" in result.stdout
    assert "interrupted: " in result.stdout
    assert Plan.load(tmp_path / "plan.json").provenance.is_interrupted
    assert run(*command, "-o", "/dev/stdout").exit_code == 130


@pytest.mark.filterwarnings("always::autopar.errors.UnknownOpWarning")
def test_warnings_are_one_line(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object, **__: object) -> object:
        warnings.warn("aten.twist has no rule", UnknownOpWarning, stacklevel=2)
        return two_axis_plan()

    monkeypatch.setattr(COMPILE, "plan", plan)
    result = run("plan", f"{target}:build", "--cluster", "4xcpu")
    assert result.stderr == "autopar: warning: aten.twist has no rule\n"
    assert result.exit_code == 0
