"""`autopar diff`: formats, statuses, and that a stored plan is all it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from autopar.cli.main import main
from tests.redone import redecided, repriced
from tests.report.plans import renamed, two_axis_plan

OLD = two_axis_plan()
NEW = msgspec.structs.replace(
    OLD,
    structure=redecided(OLD.structure, ops={"model.layers.*.mlp.up/mm": "b,-"}),
    estimates=repriced(OLD.estimates, step_ns=32 * 10**6),
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    OLD.save(tmp_path / "old.json")
    NEW.save(tmp_path / "new.json")
    return str(tmp_path / "old.json"), str(tmp_path / "new.json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["diff", *arguments])


def test_the_same_plan_ends_with_0(files: tuple[str, str]) -> None:
    result = run(files[0], files[0])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("plans  same\n")


def test_a_difference_ends_with_2(files: tuple[str, str]) -> None:
    result = run(*files)
    assert (result.exit_code, result.stderr) == (2, "")
    assert result.stdout.startswith("plans  different: decisions changed (ops); estimates moved")
    assert "\x1b" not in result.stdout
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


@pytest.mark.parametrize(("bounds", "status"), [("time=4%", 0), ("time=2%", 2), ("structure", 2)])
def test_fail_over(files: tuple[str, str], bounds: str, status: int) -> None:
    assert run(*files, "--fail-over", bounds).exit_code == status


@pytest.mark.parametrize("options", [("--json",), ("--format", "json")])
def test_json_has_all_of_it(files: tuple[str, str], options: tuple[str, ...]) -> None:
    result = run(*files, *options)
    content = json.loads(result.stdout)
    assert (result.exit_code, content["status"]) == (2, 2)
    (topic,) = content["difference"]["topics"]
    assert topic == {
        "title": "ops",
        "cause": "decision",
        "changes": [
            {
                "what": "model.layers.*.mlp.up/mm",
                "count": 1,
                "before": "n on tp, b on dp",
                "after": "b on dp",
            }
        ],
    }
    step = content["difference"]["costs"][0]
    assert (step["name"], step["before"], step["after"]) == ("step", 31 * 10**6, 32 * 10**6)


def test_markdown_is_marked_with_the_model(files: tuple[str, str]) -> None:
    result = run(*files, "--format", "md")
    assert result.exit_code == 2
    assert result.stdout.startswith("<!-- autopar-diff:v1:Toy -->\n\n**The plan changed**: ")


def test_an_error_ends_with_1(files: tuple[str, str], tmp_path: Path) -> None:
    for arguments, message in (
        ((files[0], "nowhere.json"), "cannot read plan nowhere.json"),
        ((*files, "--fail-over", "time"), "fail-over: cannot read 'time'"),
        ((*files, "--format", "html"), "--format"),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("autopar: error: ")
        assert message in result.stderr


def test_it_starts_without_torch_and_runs_no_code(files: tuple[str, str], tmp_path: Path) -> None:
    evil = tmp_path / "evil.json"
    renamed(OLD, "__import__('os').abort()").save(evil)
    code = f"""
import sys, time
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect", "pickle.find_class"):
        raise SystemError(event)
sys.addaudithook(hook)
from autopar.cli.main import main
for form in ("text", "md", "json"):
    try:
        main(["diff", {files[0]!r}, {str(evil)!r}, "--format", form])
    except SystemExit as stop:
        assert stop.code == 2
assert not {{"torch", "numpy", "transformers"}} & set(sys.modules), sorted(sys.modules)
print(time.process_time(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 1.2, "seconds of CPU for three pages; one is promised in 0.5"
