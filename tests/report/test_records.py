"""A plan that is predicted to make more of its devices than any published run is doubted."""

from __future__ import annotations

import msgspec
import pytest

from autopar.cluster.devices import DEVICES
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import Plan
from autopar.report.records import MUCH_MORE, RECORDS, above_records
from autopar.report.summary import summarize
from benchmarks.published.runs import FILES, Run, read
from tests.redone import repriced
from tests.report.plans import two_axis_plan


def predicted(
    utilisation: float, device: str = "H100", dtype: str = "bfloat16", phase: str = "backward"
) -> Plan:
    plan = two_axis_plan()
    made = ((f"{dtype}[64, 64]", "[R, R]"),)
    op = OpTotal("layers.*.up", "aten.mm.default", phase, 1, 10**12, 0, 0, 0, (), made)
    changed = repriced(plan.estimates, ops={"up": op}, mfu_ppm=round(1e6 * utilisation))
    cluster = msgspec.structs.replace(changed.cluster, device=device)
    return msgspec.structs.replace(
        plan, estimates=msgspec.structs.replace(changed, cluster=cluster)
    )


def said(plan: Plan) -> bool:
    text = next(above_records(plan), "")
    assert not text or text in summarize(plan).warnings
    return "published" in text


@pytest.mark.parametrize("device", RECORDS)
def test_only_what_is_well_above_the_record_is_doubted(device: str) -> None:
    most = RECORDS[device].utilisation
    assert not said(predicted(MUCH_MORE * most - 0.001, device))
    assert said(predicted(MUCH_MORE * most + 0.001, device))


def test_nothing_is_said_of_what_has_no_record() -> None:
    assert not said(predicted(0.9, "H100", "float32"))
    assert not said(predicted(0.9, "L4"))
    assert not said(predicted(0.9, phase="forward"))
    assert not said(two_axis_plan())


def utilisation(run: Run) -> float:
    """With the half of causal attention that is not masked, and nothing that is recomputed."""
    masked = 6.0 * run.layers * run.hidden * run.sequence
    flops = msgspec.structs.replace(run, recompute="none").flops_per_token - masked
    assert run.preset is not None
    return run.tokens_s_gpu * flops / dict(DEVICES[run.preset].flops_per_s)["bfloat16"]


@pytest.mark.parametrize("device", RECORDS)
def test_records_are_the_most_that_is_published(device: str) -> None:
    runs = [
        run
        for run in (run for path in FILES for run in read(path))
        if run.preset == device and run.float8 == "no" and run.ffn and run.words
        # Some of 405B's runs have a part of its layers.
        if run.layers == 126 or "405B" not in run.model
    ]
    best = max(runs, key=utilisation)
    assert RECORDS[device].utilisation == round(utilisation(best), 3)
    assert best.source.startswith(RECORDS[device].source.partition(",")[0])
