"""Stages that nobody asked for: where one waits, where that is worth a look, and not where the user
arranges the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster.parsing import parse_cluster
from autopar.driver.search import stages_if_needed
from autopar.driver.search.finding import Finding
from autopar.errors import AutoparError, InfeasibleError, SolverError, StageError
from autopar.ir.mesh import Cluster, Level, Link
from autopar.plans.plan import Plan
from autopar.plans.provenance import IN_STAGES
from autopar.plans.requests.policy import other_thresholds
from tests.driver.test_segments import Chain
from tests.grouped import grouped
from tests.planned import whatever_asked
from tests.redone import repriced

LOOKING = "looking for stages"


def joined_by(bytes_per_s: float, devices: int = 2) -> Cluster:
    """So slow that it does not pay to compute all on each."""
    cluster = parse_cluster(f"{devices}xH100")
    device = replace(cluster.device, flops_per_s=(("float32", 1e12),), launch_s=0.0)
    link = Link("made up", bytes_per_s, 1e-6, 0.0, "made up")
    return replace(cluster, device=device, levels=(Level(devices, link),))


def planned(
    cluster: Cluster, width: int = 2048, samples: int = 1024, **options: Any
) -> tuple[Plan, bool]:
    """The plan of a few layers, and whether stages were looked for."""
    said: list[str] = []
    with torch.device("meta"):
        model, x = Chain([width] * 9), torch.zeros(samples, width)
    found = autopar.plan(model, (x,), cluster=cluster, progress=said.append, **grouped(**options))
    return found, any(LOOKING in text for text in said)


def test_slow_links_mean_stages() -> None:
    slow = joined_by(4e8)
    found, _ = planned(slow)
    assert found.structure.is_pipeline
    assert whatever_asked(found) == whatever_asked(planned(slow, stages="auto")[0])


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1},
        {"mesh": "2"},
        {"microbatches": 2},
        {"strategy": "ddp"},
        {"pins": {"*.weight": "R"}},
        {"forbid": {"*": "*.bias"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_who_arranges_a_plan_has_one_stage(options: dict[str, Any]) -> None:
    found, has_looked = planned(joined_by(4e8), **options)
    assert not found.structure.is_pipeline and not has_looked


def test_fast_links_are_no_reason_to_look() -> None:
    found, has_looked = planned(joined_by(1e12))
    assert not found.structure.is_pipeline and not has_looked


def test_a_short_step_is_not_worth_the_time() -> None:
    with other_thresholds(hindered_ns=10**12):
        found, has_looked = planned(joined_by(4e8))
    assert not found.structure.is_pipeline and not has_looked


@pytest.mark.parametrize(("part", "is_taken"), [(0.85, True), (0.95, False)])
def test_stages_are_to_win_more_than_prices_err(
    part: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search_stages(_asked: object, _trail: object, known: Finding) -> Finding:
        estimates = repriced(known.estimates, step_ns=int(part * known.step_ns))
        return replace(known, estimates=estimates)

    plain, _ = planned(joined_by(4e8), stages=1)
    monkeypatch.setattr(stages_if_needed, "search_stages", search_stages)
    found, _ = planned(joined_by(4e8))
    assert (found.estimates.step_ns < plain.estimates.step_ns) is is_taken
    assert ("the best take" in found.provenance.statistics.get(IN_STAGES, "")) is not is_taken


@pytest.mark.parametrize("kind", [StageError, InfeasibleError, SolverError])
def test_stages_that_cannot_be_are_no_failure(
    kind: type[AutoparError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search_stages(*_: object, **_options: object) -> Finding:
        raise kind("no stages")

    monkeypatch.setattr(stages_if_needed, "search_stages", search_stages)
    found, has_looked = planned(joined_by(4e8))
    assert has_looked and not found.structure.is_pipeline
    told = "what they take is not known" if kind is SolverError else "none is better"
    assert found.provenance.statistics[IN_STAGES] == told


def test_microbatches_where_nothing_fits_at_once() -> None:
    few: dict[str, Any] = {"width": 64, "samples": 8192, "memory_limit": "8MiB"}
    with pytest.raises(InfeasibleError, match=r"--microbatches 2 "):
        planned(joined_by(1e12), microbatches=1, **few)
    found, _ = planned(joined_by(1e12), **few)
    assert not found.structure.is_pipeline
    assert whatever_asked(found) == whatever_asked(
        planned(joined_by(1e12), microbatches="auto", **few)[0]
    )


def test_stages_where_one_does_not_fit() -> None:
    """Nothing is shared evenly by two devices, and no batch is cut."""
    odd: dict[str, Any] = {"width": 509, "samples": 509, "memory_limit": "26MiB"}
    odd["residency"] = "cuda"
    with pytest.raises(InfeasibleError, match=r"the smallest-memory plan found peaks at 27\.8 MiB"):
        planned(joined_by(1e12), stages=1, **odd)
    found, has_looked = planned(joined_by(1e12), **odd)
    assert has_looked and found.estimates.memory.total <= found.estimates.memory_limit
    assert whatever_asked(found) == whatever_asked(
        planned(joined_by(1e12), stages="auto", **odd)[0]
    )


def test_where_nothing_fits_at_all_one_stage_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def search_stages(*_: object, **_options: object) -> Finding:
        raise StageError("no stages")

    monkeypatch.setattr(stages_if_needed, "search_stages", search_stages)
    with pytest.raises(InfeasibleError, match=r"^mesh dp=2: the smallest-memory plan found peaks"):
        planned(joined_by(1e12), width=509, samples=509, memory_limit="26MiB", residency="cuda")


def test_microbatches_that_hold_too_much_are_left_out_without_a_search() -> None:
    said: list[str] = []
    with torch.device("meta"):
        model, x = Chain([64] * 9), torch.zeros(8192, 64)
    with pytest.raises(InfeasibleError):
        autopar.plan(
            model,
            (x,),
            cluster=joined_by(1e12),
            progress=said.append,
            memory={"limit": "128KiB"},
            mesh="2",
            microbatches="auto",
        )
    assert any("in 8192 microbatches" in text for text in said)
    assert not any("deciding what to recompute" in text for text in said)


def test_where_stages_are_asked_for_and_nothing_fits_it_is_said_what_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"^mesh dp=2: .* What would do: --memory-limit"):
        planned(joined_by(1e12), 509, 509, stages="auto", memory_limit="4MiB")
