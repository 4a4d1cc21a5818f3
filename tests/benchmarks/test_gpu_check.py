"""The check of one GPU, run in small on the CPU, and that it can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from autopar.cluster.profile import Profile
from benchmarks import gpu_check
from benchmarks.gpu_report import Case, Results, Variant, notes, rows, slug

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu_check")
    done = run("--tiny", "--repeats", "2", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return msgspec.json.decode((folder / "gpu_check_cpu.json").read_bytes(), type=Results)


@pytest.mark.nightly
def test_gradients_are_eagers(results: Results) -> None:
    assert [case.model for case in results.cases] == [
        "GPT-2", "GPT-2, dropout 0.1", "Llama block",
    ]  # fmt: skip
    for case in results.cases:
        assert case.fine, notes(results)


@pytest.mark.nightly
def test_every_variant_is_timed(results: Results) -> None:
    for case in results.cases:
        assert [(v.name, len(v.steps_s), v.error) for v in case.variants] == [
            ("eager", 2, ""),
            ("torch.compile", 2, ""),
            ("autopar", 2, ""),
        ]
        assert min(step_s for v in case.variants for step_s in v.steps_s) > 0


@pytest.mark.nightly
def test_table_and_profile_are_written(folder: Path) -> None:
    page = (folder / "gpu_check_cpu.md").read_text(encoding="utf-8")
    assert "| GPT-2 | autopar (eager) |" in page
    assert "float32 gradients equal to eager's" in page
    assert Profile.load(folder / "profile_cpu.json").kind == "cpu"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(gpu_check.main, [])
    assert done.exit_code == 0
    assert done.output.startswith("gpu_check: skipped, no CUDA device here; --tiny")


def made_up(gradient_error: float, ours: Variant) -> Results:
    eager = Variant("eager", "eager", steps_s=(2.0, 4.0, 3.0), peak_bytes=2**30)
    lost = Variant("torch.compile", "inductor", error="RuntimeError: no compiler")
    case = Case("GPT-2", 1, 8, 1024, "bfloat16", 0.0, gradient_error, "wte", (eager, lost, ours))
    return Results("Device of the test", "0.1.0", "2.13.0", (case,))


FINE = Variant("autopar", "inductor", first_s=9.0, steps_s=(1.5, 1.5, 9.0), peak_bytes=2**29)


def test_figures_are_medians_and_their_ratios() -> None:
    assert rows(made_up(0.0, FINE)) == [
        ["GPT-2", "eager (eager)", "3000.00", "1.000", "", "1.00", "0.0"],
        ["GPT-2", "torch.compile (inductor)", "failed", "", "", "", ""],
        ["GPT-2", "autopar (inductor)", "1500.00", "0.500", "", "0.50", "9.0"],
    ]


@pytest.mark.parametrize(
    ("results", "fine", "said"),
    [
        (made_up(1e-6, FINE), True, "gradients equal"),
        (made_up(2e-5, FINE), False, "NOT EQUAL"),
        (made_up(float("nan"), FINE), False, "NOT EQUAL"),
        (made_up(0.0, Variant("autopar", "inductor", error="ValueError: x")), False, "ValueError"),
    ],
)
def test_what_is_fine(results: Results, fine: bool, said: str) -> None:
    assert results.cases[0].fine == fine
    assert any(said in line for line in notes(results))


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = made_up(0.5, FINE).cases[0]
    monkeypatch.setattr(gpu_check, "check", lambda model, setting: wrong)
    arguments = ["--tiny", "--part", "gpt2", "--out", str(tmp_path)]
    done = CliRunner().invoke(gpu_check.main, arguments)
    assert done.exit_code == 1
    assert "NOT EQUAL" in (tmp_path / "gpu_check_cpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], float("inf")),
        (None, [1.0], float("inf")),
        (None, None, 0.0),
    ],
)
def test_difference(
    ours: list[float] | None, theirs: list[float] | None, difference: float
) -> None:
    tensors = (None if values is None else torch.tensor(values) for values in (ours, theirs))
    assert gpu_check.difference(*tensors) == difference


def test_nan_is_a_difference() -> None:
    nan = gpu_check.difference(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert nan == float("inf")


def test_name_of_a_device_becomes_part_of_a_file_name() -> None:
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
