"""The benchmark of memory against time, in small on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.offload import COLUMNS, LARGEST, PARTS


@pytest.mark.nightly
def test_it_runs_in_small() -> None:
    command = [sys.executable, "-m", "benchmarks.offload", "--tiny", "--rounds", "1", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    at = lines.index(f"| {' | '.join(LARGEST)} |")
    assert lines[0] == f"| {' | '.join(COLUMNS)} |"
    peaks = {name: float(mib) for name, mib, *_ in map(cells, lines[2:at])}
    most = peaks["eager, keeps all"]
    for part in PARTS[:3]:
        assert peaks[f"autopar within {part:.0%}"] <= part * most
    assert len(peaks) >= 9
    rows = [cells(line) for line in lines[at + 2 :]]
    assert [(layers, ran) for layers, *_, ran, _ in rows] == [("2", "ran"), ("4", "ran")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
