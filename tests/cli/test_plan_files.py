"""Plan files: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cli.main import main
from autopar.errors import PlanError
from autopar.ir.files import MAX_FILE_BYTES
from autopar.plans.plan import SCHEMA_VERSION, Plan
from tests.report.any_plans import plans
from tests.report.plans import two_axis_plan

GOOD = two_axis_plan().to_bytes()
SCHEMA = f'"schema": {SCHEMA_VERSION}'


def changed(pattern: str, replacement: str) -> bytes:
    text, count = re.subn(pattern, replacement.replace("\\", r"\\"), GOOD.decode(), count=1)
    assert count == 1
    return text.encode()


HOSTILE = {
    "empty": b"",
    "truncated": GOOD[:-40],
    "no final newline": GOOD[:-1],
    "trailing bytes": GOOD + b"{}",
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "not text": b"\x80\x04\x95.",
    "bad utf-8": GOOD.replace(b"Toy", b"T\xff\xfe"),
    "lone surrogate": GOOD.replace(b'"Toy"', b'"\\ud800"'),
    "a list": b"[]\n",
    "deep nesting": b'{"schema":' + b"[" * 200_000,
    "duplicate key": changed(SCHEMA, f'"schema": 12,\n  {SCHEMA}'),
    "keys not sorted": msgspec.json.format(msgspec.json.encode(two_axis_plan()), indent=2) + b"\n",
    "compact": msgspec.json.encode(two_axis_plan(), order="sorted"),
    "schema to come": changed(SCHEMA, f'"schema": {SCHEMA_VERSION + 1}'),
    "no schema": changed(rf",\n  {SCHEMA}", ""),
    "schema of words": changed(SCHEMA, f'"schema": "{SCHEMA_VERSION}"'),
    "older schema": changed(SCHEMA, f'"schema": {SCHEMA_VERSION - 1}'),
    "unknown field": changed(SCHEMA, f'{SCHEMA},\n  "strategy": "x"'),
    "float": changed(r'"flops": \d+', '"flops": 1.5'),
    "text for a number": changed(r'"flops": \d+', '"flops": "1"'),
    "not a number": changed(r'"flops": \d+', '"flops": NaN'),
    "too large": changed(r'"flops": \d+', f'"flops": {2**80}'),
    "5,000 digits": changed(r'"flops": \d+', f'"flops": {"9" * 5000}'),
    "negative": changed(r'"flops": \d+', '"flops": -1'),
    "axis of size 0": changed(r'"size": 2', '"size": 0'),
    "axes of one name": changed(r'"name": "dp"', '"name": "tp"'),
    "unknown dtype": changed(r'"dtype": "bfloat16"', '"dtype": "bfloat17"'),
    "malformed sharding": changed(r'"for_backward": "\[R, S\(0\)\]"', '"for_backward": "[R, S(0"'),
    "sharding on three axes": changed(
        r'"for_backward": "\[R, S\(0\)\]"', '"for_backward": "[R, S(0), R]"'
    ),
    "sharding of a missing dim": changed(
        r'"for_backward": "\[R, S\(0\)\]"', '"for_backward": "[R, S(7)]"'
    ),
    "partial parameter": changed(r'"for_backward": "\[R, S\(0\)\]"', '"for_backward": "[R, P]"'),
    "immense parameter": changed(r"\[1024, 256\]", f"[{2**61}, 256]"),
    "too many parameters": changed(r"\{1-3\}", "{1-99999999}"),
    "names without a brace": changed(r"\{1-3\}", "{1-3"),
    "names by letters": changed(r"\{1-3\}", "{a-c}"),
    "names backwards": changed(r"\{1-3\}", "{3-1}"),
    "names not joined": changed(r"\{1-3\}", "{1,2-3}"),
    "no parameters": changed(r'"params": \{\n( {10}.*\n)* {8}\}', '"params": []'),
    "unknown item": changed(
        r'"order": \[\]', '"order": [\n          {"items": ["x"], "times": 1}\n        ]'
    ),
    "endless order": changed(
        r'"order": \[\]', '"order": [\n          {"items": ["loss"], "times": 1000001}\n        ]'
    ),
    "uneven curve": changed(r'"unsharded": \[\]', '"unsharded": [1]'),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_end_in_one_sentence(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(PlanError):
        Plan.load(path)
    result = CliRunner().invoke(main, ["show", str(path)])
    assert result.exit_code == 1
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert result.stderr.startswith(f"autopar: error: {path}: ")
    assert len(result.stderr) < 1000


def test_errors_that_quote_names_are_safe(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(
        GOOD.replace(b'"lm_head.weight": {"dtype": "bfloat16"', b'"\\u001b[31m": {"dtype": "x"')
    )
    result = CliRunner().invoke(main, ["show", str(path)])
    assert result.exit_code == 1
    assert "\x1b" not in result.stderr


def test_files_over_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES * 16)
    with pytest.raises(PlanError, match="at most"):
        Plan.load(path)


@given(position=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_mutated_files_load_or_are_refused(position: int, byte: int, cut: bool) -> None:
    data = GOOD[:position] + (b"" if cut else bytes([byte])) + GOOD[position + 1 :]
    try:
        plan = Plan.from_bytes(data)
    except PlanError:
        return
    assert plan.to_bytes() == data


@settings(max_examples=50)
@given(plan=plans())
def test_what_is_written_is_read_back(plan: Plan) -> None:
    assert Plan.from_bytes(plan.to_bytes()) == plan


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    two_axis_plan().save(path)
    assert Plan.load(path) == two_axis_plan()
    assert json.loads(path.read_bytes())["schema"] == SCHEMA_VERSION
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_failed_save_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    two_axis_plan().save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match=r"cannot write plan .*plan\.json: No space left"):
        two_axis_plan().save(path)
    assert path.read_bytes() == GOOD
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.processes
def test_a_killed_save_leaves_a_whole_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code = f"""
import msgspec
from tests.report.plans import two_axis_plan
from tests.redone import redecided
plan = two_axis_plan()
plans = [msgspec.structs.replace(plan, structure=redecided(
    plan.structure, ops={{str(i): name for i in range(20_000)}})) for name in "ab"]
print("ready", flush=True)
while True:
    for plan in plans:
        plan.save({str(path)!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline_s = time.monotonic() + 60
        for _ in range(20):
            while not path.exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert set(Plan.load(path).structure.only.ops.values()) in ({"a"}, {"b"})
        process.kill()
    assert set(Plan.load(path).structure.only.ops.values()) in ({"a"}, {"b"})
