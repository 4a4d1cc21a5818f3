"""The benchmark of plan time: its clock, its table, and one small case of its own process."""

from __future__ import annotations

import time

import msgspec
import pytest
from click.testing import CliRunner

from autopar.plans.requests.policy import Policy
from benchmarks import depth, irregular, memory_choices, plan_time, policy, stages
from benchmarks.plan_time import PHASES, Phases, Result, main, row


def test_nested_phases_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "process_time", lambda: now_s)
    phases = Phases()

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def plan() -> str:
        spend(1.0)
        phases.timed("price", spend)(2.0)
        phases.timed("solve", spend)(4.0)
        phases.timed("price", spend)(8.0)
        return "plan"

    assert phases.timed("plan", plan)() == "plan"
    phases.timed("rewrite", spend)(16.0)
    assert phases.cpu_s == {
        "import": 0.0,
        "build": 0.0,
        "trace": 0.0,
        "price": 10.0,
        "solve": 4.0,
        "plan": 1.0,
        "rewrite": 16.0,
    }


def test_a_failed_phase_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([0.0, 3.0])
    monkeypatch.setattr(time, "process_time", lambda: next(times_s))
    phases = Phases()
    with pytest.raises(ZeroDivisionError):
        phases.timed("plan", lambda: 1 // 0)()
    assert phases.cpu_s["plan"] == 3.0


def test_row_says_what_is_not_optimal() -> None:
    result = Result(
        case="8x8",
        layers=32,
        cpu_s=dict.fromkeys(PHASES, 1.5),
        graph_nodes=7000,
        variables=45_411,
        rows=21_735,
        peak_bytes=3 << 29,
        step_s=0.25,
        status="feasible",
        gap_ppm=12_000,
        note="planned without a memory limit: too little",
    )
    assert row(result) == [
        "8x8*", *["1.50"] * 7, "10.50", "7,000", "45,411", "21,735", "1.50", "0.25",
        "feasible, gap 1.2 %",
    ]  # fmt: skip


@pytest.mark.nightly
def test_small_case_runs() -> None:
    done = CliRunner().invoke(main, ["--case", "8", "--layers", "1", "--markdown"])
    assert done.exit_code == 0, done.output
    title, _, header, _, line = done.stdout.splitlines()[:5]
    assert title.startswith("Llama-8B, layers: 1, sequence: 2048, batch: 64")
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    phases_s = [float(cells[phase]) for phase in PHASES]
    assert sum(phases_s) == pytest.approx(float(cells["total"]), abs=0.05)
    assert min(phases_s[1:]) > 0
    assert int(cells["variables"].replace(",", "")) > 100
    assert 0.1 < float(cells["peak"]) < 4


@pytest.mark.breadth(3)
@pytest.mark.parametrize("model", [*irregular.MODELS])
def test_irregular_models_are_planned(model: str) -> None:
    cells = irregular.measure(model, 4, "2xH100")
    assert cells[:3] == [model, "4", "2xH100"]
    *seconds, total = map(float, cells[3:8])
    assert sum(seconds) == pytest.approx(total, abs=0.25)
    assert int(cells[8].replace(",", "")) > 20
    assert cells[9] == "optimal" or cells[9].startswith("gap 0.")


def test_irregular_models_with_a_target_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(irregular.subprocess, "run", lambda command, **_: asked.append(command))
    CliRunner().invoke(irregular.main, catch_exceptions=False)
    counts = {command[command.index("--model") + 1]: command[-3] for command in asked}
    assert counts == {"widening": "1000", "unet": "300", "recurrent": "512"}


def test_depths_are_compared_with_the_first() -> None:
    shallow = Result(
        case="8x8", layers=32, cpu_s=dict.fromkeys(PHASES, 1.0), graph_nodes=1000, variables=1,
        rows=1, peak_bytes=1 << 30, step_s=0.25, status="optimal", gap_ppm=0, note="",
    )  # fmt: skip
    deep = msgspec.structs.replace(shallow, layers=80, cpu_s={**shallow.cpu_s, "trace": 2.0})
    found = depth.rows([shallow, deep])
    assert [row[0] for row in found] == ["32 layers", "share", "80 layers", "share", "of 32 layers"]
    assert found[0][-5:] == ["7.00", "2.00", "1.00", "1,000", "optimal"]
    assert found[1][1:8] == ["14%"] * 7
    assert found[3][3] == "25%"
    assert found[4][1:] == ["1.00", "1.00", "2.00", *["1.00"] * 4, "1.14", *["1.00"] * 3, ""]


def test_a_case_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_time, "in_own_process", lambda case, layers: None)
    assert CliRunner().invoke(main, ["--case", "8"]).exit_code == 1


@pytest.mark.nightly
def test_no_such_cluster_is_a_failure() -> None:
    assert plan_time.in_own_process("0x8", 1) is None


@pytest.mark.nightly
def test_memory_choices_of_a_small_case() -> None:
    result = CliRunner().invoke(
        memory_choices.main, ["--case", "8b:2xH100:2:1:64", "--markdown"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    *_, line = result.output.strip().splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["8B on 2xH100", "2", "1 x 64"]
    without, found, ratio = map(float, cells[3:6])
    assert ratio == pytest.approx(found / without, rel=0.02)


def test_memory_choices_are_beside_none() -> None:
    without, found = (memory_choices.Planned(cpu_s, 1.25, 80 << 30, 2500) for cpu_s in (10.0, 14.0))
    assert memory_choices.row("8b:8xH100:8:64:2048", without, found) == [
        "8B on 8xH100", "8", "64 x 2048", "10.0", "14.0", "1.40", "1.25", "80.0", "0.25 %"
    ]  # fmt: skip


@pytest.mark.nightly
def test_stages_of_a_small_case() -> None:
    result = CliRunner().invoke(
        stages.main, ["--case", "8b:2xH100:2:64", "--markdown"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    *_, line = result.output.strip().splitlines()
    assert line.startswith("| 8B on 2xH100 | 2 x 64 |")


def test_a_pipeline_is_told_as_it_is() -> None:
    found = stages.Planned(
        60.0, "16 stages, 1f1b of 64", "dp=32,tp=8", 15.25, 401_000, 70 << 30, 90
    )
    cells = stages.row("405b:512x8xH100:2048:8192", found)
    assert cells == [
        "405B on 512x8xH100", "2048 x 8192", "60.0", "16 stages, 1f1b of 64", "dp=32,tp=8",
        "15.25", "40.1 %", "70.0", "0.009 %",
    ]  # fmt: skip
    assert len(cells) == len(stages.HEADER)


@pytest.mark.nightly
def test_a_threshold_is_tried_where_it_is_read() -> None:
    found = [*policy.rows(("4 L4, tight",), ("chunks_worth", "sharing_rounds"))]
    assert [row[:4] for row in found] == [
        ["chunks_worth", "32", value, "4 L4, tight"] for value in ("16", "64")
    ]
    assert all(float(step) > 0 for *_, step, _ in found)


def test_thresholds_are_halved_and_doubled() -> None:
    assert [*policy.tried("refined_most")] == [2, 6]
    assert [*policy.tried("stages_in_flight")] == [2, 8]
    assert [*policy.tried("prices_err")] == [0.05, 0.2]
    assert [*policy.tried("estimate_near")] == pytest.approx([1.015, 1.06])
    for name in Policy.__struct_fields__:
        assert all(type(value) is type(getattr(Policy(), name)) for value in policy.tried(name))
