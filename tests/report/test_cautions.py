"""What a person is warned of."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.stages import SEND
from autopar.plans.estimates import OpTotal
from autopar.plans.plan import IN_STAGES, Plan
from autopar.report.cautions import type_bytes
from autopar.report.summary import summarize
from tests.report.plans import MIB, two_axis_plan


def making(state: str, count: int = 1) -> Plan:
    """A plan with an op that makes a tensor of 16 MiB in a state; the limit is 50 MiB."""
    made = (("float32[2048, 2048]", state),)
    op = OpTotal("layers.*.mix", "aten.mm.default", "forward", count, 1, 0, 0, 0, (), made)
    plan = two_axis_plan()
    ops = plan.estimates.ops | {"mix": op}
    return msgspec.structs.replace(plan, estimates=msgspec.structs.replace(plan.estimates, ops=ops))


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
    roomy = msgspec.structs.replace(plan.estimates, memory_limit=2000 * MIB)
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


@pytest.mark.parametrize(
    ("part", "op", "warned"),
    [(0.4, "aten.mm.default", True), (0.3, "aten.mm.default", False), (0.4, SEND, False)],
)
def test_a_plan_in_one_stage_that_waits_names_stages(part: float, op: str, warned: bool) -> None:
    """A stage of a pipeline is not told of pipelines."""
    plan = two_axis_plan()
    own = OpTotal("layers.*.mix", op, "forward", 1, 1, 0, 0, 0)
    waits_ns = int(part * plan.estimates.step_ns)
    estimates = msgspec.structs.replace(
        plan.estimates,
        exposed_communication_ns=waits_ns,
        ops=plan.estimates.ops | {"layers.*.mix:forward:0": own},
    )
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
    step_ns = int(longer * plan.estimates.modelled_ns)
    estimates = msgspec.structs.replace(plan.estimates, step_ns=step_ns)
    found = summarize(msgspec.structs.replace(plan, estimates=estimates)).warnings
    assert any("20 % longer than as modelled" in text for text in found) is warned
