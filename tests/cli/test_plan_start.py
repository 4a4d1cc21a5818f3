"""What commands import, and when Python looks for cycles: what a plan takes beside the planning."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli.main import main

SMALL = """
import gc
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        assert not gc.isenabled()
        return self.two(self.one(x).relu()).square().mean()

def build():
    assert not gc.isenabled()
    return Small(), (torch.empty(8, 8),)
"""

HEAVY = {
    "accelerate", "diffusers", "IPython", "jinja2", "lightning", "matplotlib", "numba", "pandas",
    "safetensors", "scipy", "sklearn", "tensorflow", "torchvision", "transformers",
    "autopar.report.html", "autopar.solver.column_generation",
    "autopar.solver.message_passing", "autopar.solver.pairwise", "torch._inductor.compile_fx",
}  # fmt: skip
"""What no plan on a given mesh of two axes needs, or only a model that imports it."""

COMMAND = """
import sys
from autopar.cli.main import main
try:
    main()
except SystemExit as stop:
    print(stop.code, *sys.modules, file=sys.stderr)
"""


def modules_of(*arguments: str) -> set[str]:
    """The modules that a command has imported when it is done, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    status, *modules = done.stderr.splitlines()[-1].split()
    assert status == "0", done.stderr[:500]
    return set(modules)


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["--version"]])
def test_help_imports_click_and_little_else(arguments: list[str]) -> None:
    others = {name.partition(".")[0] for name in modules_of(*arguments)}
    others = {name for name in others if not name.startswith("_")}
    assert others - set(sys.stdlib_module_names) <= {"autopar", "click", "sitecustomize"}


def test_help_of_plan_imports_what_options_are_made_of() -> None:
    others = modules_of("plan", "--help")
    assert "msgspec" in others and not others & {"torch", "numpy", "rich", "highspy"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "small.py"
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_a_plan_imports_nothing_that_it_does_not_need(target: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    found = modules_of(
        "plan", f"{target}:build", "--cluster", "2x2xH100", "--mesh", "2x2", "-o", str(plan)
    )
    assert plan.exists()
    assert "torch" in found
    assert sorted(HEAVY & found) == []


def test_no_cycles_are_looked_for_while_a_plan_is_made(target: Path) -> None:
    """Nor is anything kept from being collected of who calls a command from Python."""
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    done = CliRunner().invoke(main, ["plan", f"{target}:build", "--cluster", "2xH100"])
    assert done.exit_code == 0, done.output
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_process_that_ends_looks_for_no_cycles() -> None:
    code = "import gc\nfrom autopar.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    print(gc.get_freeze_count())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) > 1000
