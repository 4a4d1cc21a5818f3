"""The roofline: its bounds, its shape, and what it says of a matmul."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.devices import DEVICES
from autopar.cost_model.roofline import COMPUTE_CEILING, KNEE, MEMORY_CEILING, op_s
from autopar.ir.mesh import Device

H100 = DEVICES["H100"]
devices = st.sampled_from(tuple(DEVICES.values()))
amounts = st.floats(0, 1e18)
dtypes = st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64"])


def test_a_copy_is_bound_by_memory() -> None:
    expected = H100.launch_s + 1e9 / (MEMORY_CEILING * H100.memory_bytes_per_s)
    assert op_s(0, 1e9, "float32", H100) == pytest.approx(expected, rel=1e-12)


def test_a_kernel_that_does_nothing_is_still_launched() -> None:
    assert op_s(0, 0, "float32", H100) == H100.launch_s


def test_the_documented_efficiency() -> None:
    """8192 cubed in bfloat16: compute-bound, at the efficiency that its intensity gives."""
    flops, moved = 2 * 8192**3, 3 * 2 * 8192**2
    intensity, ridge = flops / moved, H100.peak("bfloat16") / H100.memory_bytes_per_s
    efficiency = COMPUTE_CEILING * intensity / (intensity + KNEE * ridge)
    expected = H100.launch_s + flops / (H100.peak("bfloat16") * efficiency)
    assert op_s(flops, moved, "bfloat16", H100) == pytest.approx(expected, rel=1e-12)
    assert 0.65 < efficiency < COMPUTE_CEILING


def test_a_smaller_matmul_is_less_efficient() -> None:
    def efficiency(n: int) -> float:
        return 2 * n**3 / op_s(2 * n**3, 6 * n**2, "bfloat16", H100) / H100.peak("bfloat16")

    assert efficiency(256) < efficiency(1024) < efficiency(4096) < efficiency(16384)


def test_a_dtype_without_a_rate_runs_as_float32() -> None:
    v100 = DEVICES["V100"]
    assert op_s(1e12, 1e6, "bfloat16", v100) == op_s(1e12, 1e6, "float32", v100)


@given(devices, dtypes, amounts, amounts, amounts, amounts)
def test_more_work_never_takes_less_time(
    device: Device, dtype: str, f1: float, f2: float, b1: float, b2: float
) -> None:
    less = op_s(min(f1, f2), min(b1, b2), dtype, device)
    more = op_s(max(f1, f2), max(b1, b2), dtype, device)
    assert less <= more * (1 + 1e-12)


@given(devices, dtypes, amounts, amounts)
def test_nothing_beats_the_datasheet(
    device: Device, dtype: str, flops: float, moved: float
) -> None:
    bound = max(flops / device.peak(dtype), moved / device.memory_bytes_per_s)
    assert op_s(flops, moved, dtype, device) >= bound


@given(devices, dtypes, st.floats(1, 1e15), st.floats(1, 1e12))
def test_no_jumps(device: Device, dtype: str, flops: float, moved: float) -> None:
    """One part in a million more work is at most that much more time."""
    before = op_s(flops, moved, dtype, device)
    assert op_s(flops * (1 + 1e-6), moved * (1 + 1e-6), dtype, device) <= before * (1 + 1.01e-6)


def test_the_first_flop_costs_no_jump() -> None:
    assert op_s(1, 1e9, "float32", H100) == pytest.approx(op_s(0, 1e9, "float32", H100), rel=1e-9)


@pytest.mark.parametrize(("flops", "moved"), [(-1, 0), (0, -1), (math.nan, 0), (0, math.inf)])
def test_nonsense_is_an_error(flops: float, moved: float) -> None:
    with pytest.raises(ValueError, match="a kernel cannot do"):
        op_s(flops, moved, "float32", H100)
