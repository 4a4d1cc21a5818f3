"""Calls of a plan: the graph climbs no more than it does, and the solver's door is no deeper."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.count_calls import ROOT, Climb, Function, Layers, Step, climbs, stays

LAYERS = Layers((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ONE, STAGES, PRICE = "driver.search.on_mesh", "ir.passes.stages", "cost_model.price"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("driver.search", "ir.offloading"),
        ("ir.offloading", "ir.graph"),
        ("compile", "plans.fitting"),
        ("solver.pairwise.bound", "solver.pairwise.core"),
        ("tracer", "tracer.capture"),
    ],
)
def test_one_module_is_above_another(one: str, other: str) -> None:
    assert LAYERS.is_above(one, other) and not LAYERS.is_above(other, one)


@pytest.mark.parametrize(
    ("one", "other"), [("tracer.capture", "solver.ilp"), ("ir.uses", "ir.uses")]
)
def test_neither_module_is_above_the_other(one: str, other: str) -> None:
    assert not LAYERS.is_above(one, other) and not LAYERS.is_above(other, one)


def way(*modules: tuple[str, str]) -> list[Step]:
    """Steps in these modules, each called from another."""
    return [Step(Function(each, "f"), Function(caller, "g")) for each, caller in modules]


def test_stays_and_climbs_are_counted() -> None:
    down = way((ONE, ONE), (PRICE, ONE), (PRICE, PRICE), (STAGES, PRICE))
    assert [len(stay) for stay in stays(down)] == [1, 2, 1]
    assert not climbs(down, LAYERS) and not stays([])
    up = way((STAGES, ONE), (PRICE, ONE), (ONE, STAGES))
    assert climbs(up, LAYERS) == [
        Climb(STAGES, Function(PRICE, "f"), is_called_up=False),
        Climb(PRICE, Function(ONE, "f"), is_called_up=True),
    ]


def test_figures_are_within_their_limits() -> None:
    command = [sys.executable, "-m", "tools.count_calls", "--check"]
    done = subprocess.run(
        command, cwd=ROOT, check=False, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
