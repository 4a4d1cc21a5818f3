"""The same input gives the same plan, byte for byte, whatever the process has done before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def started(order: str, when: str, hash_seed: str, threads: str) -> subprocess.Popen[str]:
    """`determinism_worker` in a process of its own."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    env = os.environ | dict.fromkeys(names, threads)
    env |= {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.driver.determinism_worker", order, when]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> dict[str, str]:
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out)


@pytest.mark.parametrize("when", ["daily", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_hash_seed_threads_and_what_was_planned_before_do_not_show(when: str) -> None:
    """What comes first in one process comes last in the other, so that each end of the list is
    planned afresh and after all else."""
    first_process = started("forwards", when, "1", threads="1")
    processes = first_process, started("backwards", when, "4242", threads="2")
    first, second = map(printed, processes)
    assert len(set(first.values())) == len(first) > 1
    assert first == second
