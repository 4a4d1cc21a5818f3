"""The benchmark against torch's partitioner: how it measures memory, and a budget of a model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.partitioner import HEADER, peak_bytes

MIB = 2**20


@pytest.mark.nightly
def test_peak_is_what_is_allocated_beyond_what_was_there() -> None:
    before = torch.ones(3 * MIB, dtype=torch.uint8)

    def run() -> None:
        first = torch.ones(2 * MIB, dtype=torch.uint8)
        second = first + before[: 2 * MIB]
        del first, second
        torch.ones(MIB, dtype=torch.uint8)

    assert 4 * MIB <= peak_bytes(run) <= 4.1 * MIB


@pytest.mark.nightly
def test_one_budget() -> None:
    command = [sys.executable, "-m", "benchmarks.partitioner", "--markdown", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--model", "gpt2", "--budget", "0.25"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *_, header, _, row = done.stdout.strip().splitlines()
    assert header == f"| {' | '.join(HEADER)} |"
    theirs, ours, predicted = map(float, row.split(" | ")[2:5])
    # A plan keeps within the peak that it was given.
    assert ours <= predicted <= theirs
