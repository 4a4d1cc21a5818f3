"""What a program takes, measured while it runs, and told beside its plan."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx

import autopar
from autopar.errors import AutoparError
from autopar.plans.run_record import RunRecord
from autopar.runtime.program import meter as meters
from autopar.runtime.program.meter import Meter
from tests.runtime.report_workers import trained
from tests.runtime.spawn import spawn

ROOT = Path(__file__).resolve().parents[2]
c10d = torch.ops._c10d_functional


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A clock that goes on when it is told to."""
    now = [0]
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: now[0])
    yield now


def steps(meter: Meter, clock: list[int], num: int) -> None:
    """Steps of 10 forward, 2 of them waiting, 20 backward and 5 of the script's own."""

    def forward(_: list[object]) -> list[object]:
        clock[0] += 8
        meters.before_wait()
        clock[0] += 2
        meters.after_wait()
        return []

    def backward(_: list[object]) -> list[object]:
        clock[0] += 20
        return []

    run_forward, run_backward = meter.timed("forward", forward), meter.timed("backward", backward)
    for _ in range(num):
        run_forward([])
        run_backward([])
        clock[0] += 5


def test_medians_of_all_steps_but_the_first(clock: list[int]) -> None:
    meter = Meter(torch.device("cpu"), counts_waits=True)
    steps(meter, clock, 1)
    assert meter.measured() is None
    clock[0] += 1000
    steps(meter, clock, 1)
    found = meter.measured()
    assert found is not None
    assert (found.step_ns, found.passes_ns, found.exposed_ns) == (None, 30, 2)
    steps(meter, clock, 3)
    found = meter.measured()
    assert found is not None
    assert (found.step_ns, found.passes_ns, found.exposed_ns) == (35, 30, 2)
    assert (found.peak_bytes, meter.num_steps) == (None, 4)


def test_a_forward_alone_is_no_step(clock: list[int]) -> None:
    meter = Meter(torch.device("cpu"))
    steps(meter, clock, 2)
    meter.timed("forward", lambda _: [])([])
    assert meter.num_steps == 1
    found = meter.measured()
    assert found is not None
    assert found.exposed_ns is None


def test_waits_of_a_graph_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    waited = graph.call_function(c10d.wait_tensor.default, (x,))
    graph.output((graph.call_function(torch.ops.aten.neg.default, (waited,)),))
    gm = fx.GraphModule({}, graph)
    meter = Meter(torch.device("cpu"))
    meter.count_waits(gm)
    told: list[str] = []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: told.append("read") or 0)
    (found,) = gm(torch.ones(2))
    assert told == ["read", "read"]
    assert meter.counts_waits
    assert found.tolist() == [-1, -1]


def test_one_process_reports() -> None:
    model = trained(3)
    found = autopar.run_report(model)
    assert found.record.steps == 2
    assert found.record.measured.exposed_ns == 0
    assert found.record.measured.step_ns
    assert found.record.measured.passes_ns
    page = str(found).splitlines()
    assert page[0].endswith("1 of 1xcpu, eager, 2 steps as rank 0 saw them")
    assert page[1].split() == ["what", "predicted", "measured", "ratio"]
    assert page[7].endswith("not measured")


def test_what_cannot_be_reported_is_said() -> None:
    with pytest.raises(AutoparError, match="no step was measured: report after a second"):
        autopar.run_report(trained(1))
    with pytest.raises(AutoparError, match=r"the model that autopar\.compile returned"):
        autopar.run_report(torch.nn.Linear(2, 2))


@pytest.mark.processes
def test_two_processes_wait_for_one_another() -> None:
    """Rank 1 is late by 50 ms in each backward, which rank 0 waits for and computes beside."""
    first, second = (RunRecord.from_bytes(str(each).encode()) for each in spawn_reports())
    late_ns = 50_000_000
    assert first.measured.exposed_ns is not None
    assert second.measured.exposed_ns is not None
    assert first.measured.exposed_ns > 0.8 * late_ns
    assert second.measured.exposed_ns < first.measured.exposed_ns
    assert (first.rank, second.rank, first.predicted) == (0, 1, second.predicted)


def spawn_reports() -> list[object]:
    return spawn("tests.runtime.report_workers.report", 2)


def test_the_environment_asks_for_a_report(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code = "from tests.runtime.report_workers import trained; model = trained(3)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "AUTOPAR_REPORT": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "forward and backward" in done.stderr
    assert RunRecord.load(path).steps == 2
    assert done.stdout == ""
