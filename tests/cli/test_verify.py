"""`verify`: equal to eager, or a sentence that names what is not."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import autopar
from autopar.cli.main import main
from autopar.driver import verify
from autopar.errors import AutoparError, PlanMismatchError, VerificationError
from autopar.plans.plan import Plan
from autopar.runtime.simulator.comparison import Report
from autopar.runtime.simulator.differences import SimulatedStep, differences

VERIFY = importlib.import_module("autopar.driver.verify")

TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        return y.square().mean(), y

def build():
    return Net(16), lambda batch: (torch.randn(batch, 8),)

def wider():
    return Net(32), lambda batch: (torch.randn(batch, 8),)

def leaving():
    raise SystemExit(0)

class Leaving(Net):
    def forward(self, x):
        raise SystemExit(0)

def leaving_later():
    return Leaving(16), lambda batch: (torch.randn(batch, 8),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify")
    (path / "verify_target.py").write_text(TARGET)
    result = run("plan", path, "--cluster", "4xcpu", "--mesh", "2x2", "-o", str(path / "plan.json"))
    assert result.exit_code == 0, result.stderr
    return path


def run(command: str, folder: Path, *options: str, function: str = "build") -> Result:
    target = f"{folder / 'verify_target.py'}:{function}"
    files = [str(folder / "plan.json")] if command == "verify" else []
    arguments = [command, *files, target, "--global-batch", "8", *options]
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [((), "float32", 1e-5), (("--dtype", "float64"), "float64", 1e-9)],
)
def test_equal(folder: Path, options: tuple[str, ...], dtype: str, tolerance: float) -> None:
    result = run("verify", folder, "--json", *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["dtype"], report["tolerance"], report["num_ranks"]) == (dtype, tolerance, 4)
    assert {d["name"] for d in report["differences"]} == {
        "output 0 (loss)",
        "output 1",
        *(f"gradient of {name}.{kind}" for name in ("up", "down") for kind in ("weight", "bias")),
    }
    assert all(d["largest"] > 0 for d in report["differences"])


def test_page(folder: Path) -> None:
    lines = run("verify", folder).stdout.splitlines()
    assert lines[-1] == (
        "equal: loss and gradients, 6 tensors, 4 ranks against eager, float32, tolerance 1e-05, "
        "seed 0"
    )


def test_seeds_change_the_weights(folder: Path) -> None:
    largest = [
        [
            d["largest"]
            for d in json.loads(run("verify", folder, "--json", *seed).stdout)["differences"]
        ]
        for seed in ((), ("--seed", "0"), ("--seed", "1"))
    ]
    assert largest[0] == largest[1] != largest[2]


def test_a_wrong_gradient_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.train_step

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        result.gradients["down.weight"][0, 0] += 1e-3
        return result

    monkeypatch.setattr(verify, "train_step", wrong)
    result = run("verify", folder)
    assert result.exit_code == 4
    assert "1 of 6 tensors differ from eager by more than 1e-05: gradient of down.weight" in (
        result.stderr
    )
    assert result.stdout.splitlines()[-1].startswith("1 of 6 tensors differ, 4 ranks")


def test_plan_of_another_model(folder: Path) -> None:
    result = run("verify", folder, function="wider")
    assert result.exit_code == 5
    assert result.stderr.startswith("autopar: error: the plan")
    assert "up.weight" in result.stderr


class Mixed(nn.Module):
    """Computes in float32 whatever it is: in another dtype it has casts."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).float().square().mean()


def test_casts_in_the_model_are_to_the_dtype_that_is_asked_for() -> None:
    model, inputs = Mixed(), (torch.randn(4, 4),)
    plan = autopar.plan(model, inputs, cluster="2xcpu")
    assert autopar.verify(plan, model, inputs).dtype == "float32"
    report = VERIFY.compare_with_eager(plan, model, inputs, dtype="float64")
    assert (report.dtype, report.tolerance) == ("float64", 1e-9)
    report.check()


def test_model_without_values_cannot_be_verified() -> None:
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(4, 4)), (torch.randn(4, 4),)
    plan = autopar.plan(model, inputs, cluster="2xcpu")
    with pytest.raises(AutoparError, match=r"param:0\.weight is on the meta device"):
        autopar.verify(plan, model, inputs)


@pytest.mark.filterwarnings("ignore::autopar.errors.UnknownOpWarning")
def test_outputs_that_are_no_loss_and_buffers_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()).double()
    inputs = (torch.randn(16, 4, dtype=torch.float64),)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = autopar.plan(model, inputs, cluster="2xcpu")
    report = autopar.verify(plan, model, inputs)
    assert {"output 0", "buffer 1.running_mean", "gradient of 0.weight"} <= {
        d.name for d in report.differences
    }
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def test_a_stale_plan_is_refused() -> None:
    model, inputs = nn.Linear(4, 4), (torch.randn(4, 4),)
    plan = autopar.plan(model, inputs, cluster="2xcpu")
    with pytest.raises(PlanMismatchError, match="the plan is for inputs"):
        autopar.verify(Plan.from_bytes(plan.to_bytes()), model, (torch.randn(8, 4),))


def one(found: float, eager: float) -> float:
    """The relative difference of an output with one element."""
    steps = (SimulatedStep(outputs={"0": torch.tensor(x)}) for x in (found, eager))
    return differences(*steps)[0].relative


def test_differences() -> None:
    assert one(1.5, 1.0) == 0.5
    assert one(0.0, 0.0) == 0.0
    assert one(1e-30, 0.0) == math.inf
    assert one(math.nan, 1.0) == math.inf
    assert one(1.0, math.nan) == math.inf
    assert one(math.inf, math.inf) == 0.0
    assert one(-math.inf, math.inf) == math.inf


def test_what_is_missing_or_of_another_shape_differs() -> None:
    eager = SimulatedStep(outputs={"0": torch.ones(())}, gradients={"w": torch.ones(2)})
    assert [d.relative for d in differences(SimulatedStep(), eager)] == [math.inf] * 2
    assert [d.why for d in differences(eager, SimulatedStep())] == [
        "in the compiled model alone"
    ] * 2
    shapes = replace(eager, gradients={"w": torch.ones(1)})
    assert [d.relative for d in differences(shapes, eager)] == [0.0, math.inf]


def test_gradients_of_rounding_alone_do_not_fail() -> None:
    eager = SimulatedStep(gradients={"w": torch.ones(2), "cancelled": torch.full((2,), 1e-9)})
    found = SimulatedStep(gradients={"w": torch.ones(2), "cancelled": torch.full((2,), -1e-9)})
    assert max(d.relative for d in differences(found, eager)) < 1e-6


def test_failed_check_names_the_worst() -> None:
    eager = SimulatedStep(gradients={f"w{i}": torch.ones(1) for i in range(7)})
    found = SimulatedStep(gradients={f"w{i}": torch.ones(1) + i for i in range(7)})
    report = Report("Net", "", 2, "float32", 1e-5, 0, differences(found, eager))
    with pytest.raises(VerificationError, match=r"6 of 7 .* gradient of w6 \(by 6\).* and 1 more"):
        report.check()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.layer(x), 0.5).square().mean()


def test_both_sides_draw_the_same_random_numbers() -> None:
    model, inputs = Dropped(), (torch.randn(8, 8),)
    plan = autopar.plan(model, inputs, cluster="2xcpu")
    before = torch.get_rng_state()
    autopar.verify(plan, model, inputs)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("function", ["leaving", "leaving_later"])
def test_a_target_that_ends_the_process_is_an_error(folder: Path, function: str) -> None:
    result = run("verify", folder, function=function)
    assert result.exit_code == 1
    assert "the target ended the process (sys.exit(0))" in result.stderr
