"""What a person is warned of."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.plans.cluster_rates import LinkRates
from autopar.plans.estimates import CollectiveTotal, OpTotal
from autopar.plans.plan import Plan
from autopar.plans.provenance import IN_STAGES
from autopar.report.cautions import type_bytes
from autopar.report.summary import summarize
from tests.redone import repriced
from tests.report.plans import MIB, staged_plan, two_axis_plan


def making(state: str, count: int = 1) -> Plan:
    """A plan with an op that makes a tensor of 16 MiB in a state; the limit is 50 MiB."""
    made = (("float32[2048, 2048]", state),)
    op = OpTotal("layers.*.mix", "aten.mm.default", "forward", count, 1, 0, 0, 0, (), made)
    plan = two_axis_plan()
    ops = plan.estimates.stages[0].ops | {"mix": op}
    return msgspec.structs.replace(plan, estimates=repriced(plan.estimates, ops=ops))


@pytest.mark.parametrize(
    ("state", "count", "warned"),
    [("[R, R]", 1, True), ("[R, S(0)]", 1, False), ("[R, P]", 1, False), ("[R, R]", 0, False),
     ("odd", 1, False)],
)  # fmt: skip
def test_a_large_tensor_that_every_device_makes_is_named(
    state: str, count: int, warned: bool
) -> None:
    text = "every device makes all of layers.*.mix: mm, 16 MiB"
    assert (text in summarize(making(state, count)).warnings) is warned


def test_small_ones_and_single_devices_are_not() -> None:
    plan = making("[R, R]")
    roomy = repriced(plan.estimates, memory_limit=2000 * MIB)
    assert not any(
        "makes all" in text
        for text in summarize(msgspec.structs.replace(plan, estimates=roomy)).warnings
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("bfloat16[64, 2048]", 2 * 64 * 2048), ("int64[]", 8), ("float99[2]", 0), ("float32", 0),
     (f"float32[{'9' * 400}]", 0), ("float32[-4]", 0)],
)  # fmt: skip
def test_bytes_of_a_type(text: str, size: int) -> None:
    assert type_bytes(text) == size


@given(st.text(max_size=20))
def test_bytes_of_no_type(text: str) -> None:
    assert isinstance(type_bytes(text), int)


@pytest.mark.parametrize(("part", "warned"), [(0.96, True), (0.94, False)])
@pytest.mark.parametrize("plan", [two_axis_plan(), staged_plan()], ids=["one stage", "stages"])
def test_a_device_that_is_nearly_full(plan: Plan, part: float, warned: bool) -> None:
    """The device, and not a limit: a plan of a frontier is as large as its own limit."""
    held = plan.estimates.memory.total
    cluster = msgspec.structs.replace(plan.estimates.cluster, memory_bytes=int(held / part))
    for limit in (held, 10 * held):
        estimates = repriced(plan.estimates, memory_limit=limit)
        estimates = msgspec.structs.replace(estimates, cluster=cluster)
        found = summarize(msgspec.structs.replace(plan, estimates=estimates)).warnings
        told = [text for text in found if "full at the peak" in text]
        assert len(told) == warned
        assert all(text.startswith("a device's memory is 96 % full") for text in told)


@pytest.mark.parametrize(("part", "link"), [(0.9, "to host"), (0.9, "from host"), (0.7, "")])
def test_a_link_to_the_host_that_is_busy(part: float, link: str) -> None:
    plan = two_axis_plan()
    time_ns = int(part * plan.estimates.step_ns)
    copies = CollectiveTotal("offload", link or "to host", "forward", 1, 1, time_ns)
    estimates = repriced(plan.estimates, collectives=(copies,))
    found = summarize(msgspec.structs.replace(plan, estimates=estimates)).warnings
    told = [text for text in found if text.startswith("copies ")]
    assert len(told) == bool(link) and all(f"copies {link} take 90 %" in text for text in told)


@pytest.mark.parametrize(("axis", "part", "warned"), [(0, 0.6, 1), (0, 0.4, 0), (1, 0.9, 0)])
def test_a_step_that_leans_on_links_between_nodes(axis: int, part: float, warned: int) -> None:
    """Links in a node are what its devices have."""
    plan = two_axis_plan()
    name = plan.stages[0].structure.mesh[axis].name
    time_ns = int(part * plan.estimates.step_ns)
    sums = CollectiveTotal("all_reduce", name, "backward", 1, 1, time_ns)
    outer, inner = (LinkRates(text, 2, 10**9, 1, 1, 1, ()) for text in ("between", "in a node"))
    cluster = msgspec.structs.replace(plan.estimates.cluster, links=(outer, inner))
    estimates = repriced(plan.estimates, collectives=(sums,))
    estimates = msgspec.structs.replace(
        estimates,
        stages=tuple(msgspec.structs.replace(e, cluster=cluster) for e in estimates.stages),
    )
    found = summarize(msgspec.structs.replace(plan, estimates=estimates)).warnings
    told = [text for text in found if text.startswith(outer.name)]
    assert len(told) == warned and all("busy for 60 % of the step" in text for text in told)
    assert not any(text.startswith(inner.name) for text in found)


@pytest.mark.parametrize(
    ("plan", "part", "warned"),
    [(two_axis_plan(), 0.4, True), (two_axis_plan(), 0.3, False), (staged_plan(), 0.4, False)],
    ids=["waits", "does not", "in stages"],
)
def test_a_plan_in_one_stage_that_waits_names_stages(plan: Plan, part: float, warned: bool) -> None:
    """A pipeline is not told of pipelines."""
    waits_ns = int(part * plan.estimates.step_ns)
    estimates = repriced(plan.estimates, exposed_communication_ns=waits_ns)
    plan = msgspec.structs.replace(plan, estimates=estimates)
    found = summarize(plan).warnings
    assert any("--pipeline-stages auto looks for them" in text for text in found) is warned
    told = msgspec.structs.replace(plan.provenance, statistics={IN_STAGES: "the best take 2 ms"})
    found = summarize(msgspec.structs.replace(plan, provenance=told)).warnings
    assert any("(looked for: the best take 2 ms)" in text for text in found) is warned
    assert not any("--pipeline-stages auto" in text for text in found)


@pytest.mark.parametrize(("longer", "warned"), [(1.2, True), (1.1, False)])
def test_a_step_that_takes_longer_than_as_modelled_is_told(longer: float, warned: bool) -> None:
    plan = two_axis_plan()
    step_ns = int(longer * plan.estimates.stages[0].modelled_ns)
    estimates = repriced(plan.estimates, step_ns=step_ns)
    found = summarize(msgspec.structs.replace(plan, estimates=estimates)).warnings
    assert any("20 % longer than as modelled" in text for text in found) is warned
