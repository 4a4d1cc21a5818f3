"""Prices between measured points: they meet the points, rise with every size, and go on as the law
says."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from autopar.cluster.devices import DEVICES
from autopar.cluster.measured import device_from_profile
from autopar.cluster.profile import Attention, Matmul, Pointwise, Profile
from autopar.cost_model.roofline import attention_s, matmul_s, pointwise_s
from autopar.ir.mesh import Device, Measured
from autopar.rules.op import Scores
from tests.cost_model.test_measured import made_up

SIDES, DEPTHS, KEYS = (64, 256, 1024), (32, 128, 1024, 4096), (128, 512, 2048)


def disturbed(kind: str) -> Profile:
    """Times of H100 or of a CPU, each up to three times as long as its price."""
    base, draw = DEVICES["H100" if kind == "cuda" else "cpu"], random.Random(0)

    def ns(seconds: float) -> int:
        return round(seconds * draw.uniform(1, 3) * 1e9) + 1

    return msgspec.structs.replace(
        made_up(kind=kind),
        matmuls=tuple(
            Matmul(n, k, n, "float32", ns(matmul_s(n * n, k, 0, "float32", base)))
            for n in SIDES
            for k in DEPTHS
        ),
        attentions=tuple(
            Attention(
                4096 // keys, 4, keys, 64, "float32", *(ns(law_s(keys, b, base)) for b in (0, 1))
            )
            for keys in KEYS
        ),
        pointwise=tuple(
            Pointwise(4**k, "float32", ns(pointwise_s(4**k, base, 0.8, starts=True)))
            for k in range(6, 13)
        ),
    )


def law_s(keys: int, backward: int, device: Device, rows: int = 4 * 4096) -> float:
    per_score = 10.0 if backward else 4.0
    scores = Scores(rows, keys, 64, per_score, True, bool(backward))
    return attention_s(per_score * 64 * rows * keys / 2, scores, 0, "float32", device)


@pytest.fixture(params=["cuda", "cpu"])
def profile(request: pytest.FixtureRequest) -> Profile:
    return disturbed(request.param)


@pytest.fixture
def device(profile: Profile) -> Device:
    return device_from_profile(profile, DEVICES["H100" if profile.kind == "cuda" else "cpu"])


def rises(prices: list[float]) -> bool:
    return all(a <= b * (1 + 1e-12) + 1e-18 for a, b in pairwise(prices))


def test_products_meet_what_was_measured(profile: Profile, device: Device) -> None:
    """Unless a larger one took less."""
    for entry in profile.matmuls:
        larger = (e.time_ns for e in profile.matmuls if e.m >= entry.m and e.k >= entry.k)
        found_s = matmul_s(entry.m * entry.n, entry.k, entry.num_bytes, "float32", device)
        assert found_s == pytest.approx(min(larger) * 1e-9, rel=1e-9)


def test_products_rise_with_elements_and_with_depth(device: Device) -> None:
    sizes = [round(1.3**k) for k in range(1, 70)]
    for other in sizes[::6]:
        assert rises([matmul_s(size, other, 0, "float32", device) for size in sizes])
        assert rises([matmul_s(other, size, 0, "float32", device) for size in sizes])


def test_products_outside_go_on_as_the_law_says(device: Device) -> None:
    law = replace(device, measured=Measured())

    def ratio(on: Device, *sizes: tuple[int, int]) -> float:
        first, last = (matmul_s(out, k, 0, "float32", on) for out, k in sizes)
        return last / first

    edge, beyond = (SIDES[-1] ** 2, DEPTHS[-1]), (SIDES[-1] ** 2 * 9, DEPTHS[-1])
    assert ratio(device, edge, beyond) == pytest.approx(ratio(law, edge, beyond))
    edge, beyond = (SIDES[0] ** 2, DEPTHS[0]), (SIDES[0] ** 2, 1)
    assert ratio(device, edge, beyond) == pytest.approx(ratio(law, edge, beyond))


def test_other_dtypes_are_priced_by_the_law(device: Device) -> None:
    law = replace(device, measured=Measured())
    assert matmul_s(4096, 128, 0, "float64", device) == matmul_s(4096, 128, 0, "float64", law)


def test_pointwise_ops_meet_what_was_measured_and_rise(profile: Profile, device: Device) -> None:
    part = device.kernels.pointwise
    for k, entry in enumerate(profile.pointwise):
        least = min(e.time_ns for e in profile.pointwise[k:])
        found_s = pointwise_s(entry.num_bytes, device, part, starts=True)
        assert found_s == pytest.approx(least * 1e-9, rel=1e-9)
    for starts in (False, True):
        sizes = [round(1.3**k) for k in range(90)]
        assert rises([pointwise_s(size, device, part / 2, starts=starts) for size in sizes])
    law = replace(device, measured=Measured())
    beyond = [pointwise_s(size, device, part, starts=True) for size in (4**12, 4**14)]
    by_law = [pointwise_s(size, law, part, starts=True) for size in (4**12, 4**14)]
    assert beyond[1] / beyond[0] == pytest.approx(by_law[1] / by_law[0])


@pytest.mark.parametrize("backward", [0, 1])
def test_attention_meets_what_was_measured_and_rises(
    profile: Profile, device: Device, backward: int
) -> None:
    times = [e.backward_ns if backward else e.forward_ns for e in profile.attentions]
    for k, keys in enumerate(KEYS):
        assert law_s(keys, backward, device) == pytest.approx(min(times[k:]) * 1e-9, rel=1e-9)
    lengths = [round(1.2**k) for k in range(1, 60)]
    for rows in (64, 4 * 4096, 10**6):
        assert rises([law_s(keys, backward, device, rows) for keys in lengths])


def test_without_a_profile_laws_hold() -> None:
    assert DEVICES["H100"].measured == Measured()
