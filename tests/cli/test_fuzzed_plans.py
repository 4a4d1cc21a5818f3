"""Damaged plan files: no command ends in a traceback, none runs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("files", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_damaged_files_end_cleanly_and_run_nothing(files: int, tmp_path: Path) -> None:
    worker = [sys.executable, "-m", "tests.cli.fuzzed_plans", str(files), str(tmp_path)]
    result = subprocess.run(worker, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-3000:]
    ends = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    # Some damage leaves a valid plan: both ends must have been met.
    assert int(ends["show 0"]) > files // 50
    assert int(ends["show 1"]) > files
