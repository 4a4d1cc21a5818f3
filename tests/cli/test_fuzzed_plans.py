"""A thousand damaged plan files: no command ends in a traceback, none runs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILES = 1000


def test_damaged_files_end_cleanly_and_run_nothing(tmp_path: Path) -> None:
    worker = [sys.executable, "-m", "tests.cli.fuzzed_plans", str(FILES), str(tmp_path)]
    result = subprocess.run(worker, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-3000:]
    ends = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    # Some damage leaves a valid plan: both ends must have been met.
    assert int(ends["show 0"]) > 20
    assert int(ends["show 1"]) > FILES
