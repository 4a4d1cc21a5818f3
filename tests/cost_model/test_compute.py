"""Kernels: their ceilings and shapes, and what is said of products and attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.devices import DEVICES
from autopar.cost_model.roofline import attention_s, matmul_s, stream_s
from autopar.ir.mesh import Device
from autopar.rules.op import Scores

H100 = DEVICES["H100"]
GPUS = tuple(device for device in DEVICES.values() if device.kind == "cuda")
devices = st.sampled_from(tuple(DEVICES.values()))
amounts = st.floats(0, 1e15)
sizes = st.integers(1, 1 << 15)
dtypes = st.sampled_from(["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int64"])


def square(m: int, k: int, n: int, device: Device, dtype: str = "bfloat16") -> float:
    return matmul_s(m * n, k, 2 * (m * k + k * n + m * n), dtype, device)


def attended(
    device: Device, batch: int, heads: int, length: int, head_dim: int, **how: bool
) -> float:
    """Attention of a sequence with itself."""
    causal, backward = how.get("causal", False), how.get("backward", False)
    per_score = 10.0 if backward else 4.0
    rows = batch * heads * length
    scores = Scores(rows, length, head_dim, per_score, causal, backward)
    flops = per_score * rows * length * head_dim * (0.5 if causal else 1.0)
    tensors = 8 if backward else 4
    return attention_s(flops, scores, tensors * 2 * rows * head_dim, "bfloat16", device)


def test_a_copy_is_bound_by_memory() -> None:
    assert stream_s(1e9, H100) == pytest.approx(1e9 / (0.8 * 3.35e12), rel=1e-12)
    assert stream_s(1e9, H100, 0.5) == pytest.approx(1e9 / (0.5 * 3.35e12), rel=1e-12)


def test_the_documented_efficiency_of_a_product() -> None:
    """4096 x 1024 x 8192 on H100: two waves of 132 multiprocessors' tiles, sums of 1024."""
    waves = 4096 * 8192 / (128 * 128 * 132)
    efficiency = 0.849 * 0.9 * waves / (waves + 0.15) * 1024 / (1024 + 164)
    expected = 2.9e-6 + 2 * 4096 * 1024 * 8192 / (989.4e12 * efficiency)
    assert square(4096, 1024, 8192, H100) == pytest.approx(expected, rel=1e-12)


def test_a_thin_product_is_bound_by_memory() -> None:
    expected = 2.9e-6 + 2 * (8192**2 + 2 * 8192) / (0.847 * 3.35e12)
    assert square(1, 8192, 8192, H100) == pytest.approx(expected, rel=1e-12)


def test_a_smaller_product_is_less_efficient() -> None:
    def efficiency(n: int) -> float:
        return 2 * n**3 / square(n, n, n, H100) / H100.peak("bfloat16")

    assert efficiency(256) < efficiency(1024) < efficiency(4096) < efficiency(16384) < 0.849 * 0.9


def test_dtypes_have_their_own_rate_and_unknown_ones_that_of_float32() -> None:
    v100 = DEVICES["V100"]
    wide = [
        square(8192, 8192, 8192, H100, dtype) for dtype in ("float8_e4m3fn", "bfloat16", "float32")
    ]
    assert 1.9 < wide[1] / wide[0] < 2.1 and 14 < wide[2] / wide[1] < 15
    assert square(512, 512, 512, v100, "bfloat16") == square(512, 512, 512, v100, "float32")


def test_a_cpu_launches_its_own_kernels() -> None:
    cpu = replace(DEVICES["cpu"], launch_s=7e-6)
    assert matmul_s(0, 0, 0, "float32", cpu) == 7e-6


@given(devices, dtypes, *[amounts] * 6)
def test_more_of_a_product_never_takes_less_time(
    device: Device, dtype: str, o1: float, o2: float, k1: float, k2: float, b1: float, b2: float
) -> None:
    less = matmul_s(min(o1, o2), min(k1, k2), min(b1, b2), dtype, device)
    more = matmul_s(max(o1, o2), max(k1, k2), max(b1, b2), dtype, device)
    assert less <= more * (1 + 1e-12)


@given(devices, st.booleans(), st.booleans(), *[sizes] * 4)
def test_more_attention_never_takes_less_time(
    device: Device, causal: bool, backward: bool, heads: int, a: int, b: int, head_dim: int
) -> None:
    how = {"causal": causal, "backward": backward}
    less, more = (attended(device, 1, heads, length, head_dim, **how) for length in sorted((a, b)))
    assert less <= more * (1 + 1e-12)
    assert less <= attended(device, 1, heads + 1, min(a, b), head_dim, **how) * (1 + 1e-12)


@given(devices, dtypes, sizes, sizes, sizes)
def test_nothing_beats_the_datasheet(device: Device, dtype: str, m: int, k: int, n: int) -> None:
    moved = 2 * (m * k + k * n + m * n)
    bound = max(2 * m * k * n / device.peak(dtype), moved / device.memory_bytes_per_s)
    assert square(m, k, n, device, dtype) >= bound


@given(devices, dtypes, st.floats(1, 1e12), st.floats(1, 1e6), st.floats(1, 1e12))
def test_no_jumps(device: Device, dtype: str, out: float, depth: float, moved: float) -> None:
    """One part in a million more of everything is at most a bit more than twice that in time."""
    before = matmul_s(out, depth, moved, dtype, device)
    more = (amount * (1 + 1e-6) for amount in (out, depth, moved))
    assert matmul_s(*more, dtype, device) <= before * (1 + 2.01e-6)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_no_jump_between_widths_of_heads(device: Device, head_dim: int) -> None:
    one, next_one = (attended(device, 4, 32, 4096, d) for d in (head_dim, head_dim + 1))
    assert one * (1 - 1e-9) <= next_one <= one * (1 + 1.5 / head_dim)


def test_long_attention_is_faster_a_score_and_slower_where_it_is_causal_or_backward() -> None:
    per_score = [attended(H100, 2, 32, n, 128) / n**2 for n in (512, 2048, 8192, 32768)]
    assert per_score == sorted(per_score, reverse=True)
    full, causal = (attended(H100, 2, 32, 4096, 128, causal=causal) for causal in (False, True))
    assert 0.55 * full < causal < 0.6 * full
    backward = attended(H100, 2, 32, 8192, 128, backward=True)
    assert backward / attended(H100, 2, 32, 8192, 128) == pytest.approx(2.5 / 0.87, rel=0.01)


def test_one_long_row_of_tiles_leaves_most_processors_idle() -> None:
    """Eight heads of 2,048 rows are as many tiles as H100 has processors, 16 x 8 = 128 < 132."""
    few, many = (attended(H100, 1, heads, 2048, 128) for heads in (1, 8))
    assert few == many < attended(H100, 1, 9, 2048, 128)


@pytest.mark.parametrize("amounts", [(-1, 0, 0), (0, -1, 0), (math.nan, 0, 0), (0, 0, math.inf)])
def test_nonsense_is_an_error(amounts: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="a kernel cannot do"):
        matmul_s(*amounts, "float32", H100)
