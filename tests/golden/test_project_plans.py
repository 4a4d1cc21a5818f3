"""The project's own golden plans: its benchmarks, some of its zoo, and the example of the gate.

`autopar check plans examples/ci_gate/plans --update` writes those anew that changed on purpose.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.driver.gate.golden import Check, find_recipes, run_all
from autopar.report.verdict import verdict_line

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "plans", "examples/ci_gate/plans"


@pytest.mark.processes
def test_no_plan_moved_unseen() -> None:
    """Whatever this machine has solved before, each is solved here."""
    recipes = find_recipes(str(ROOT / folder) for folder in FOLDERS)
    assert len(recipes) >= 7
    workers = 2 if "PYTEST_XDIST_WORKER" not in os.environ else 1
    found = run_all(recipes, Check(cache=None, num_processes=workers), lambda _: None)
    wrong = {
        outcome.name: outcome.message or (outcome.verdict and verdict_line(outcome.verdict))
        for outcome in found
        if outcome.status != "same"
    }
    assert not wrong, "autopar check plans examples/ci_gate/plans --update writes them anew"
