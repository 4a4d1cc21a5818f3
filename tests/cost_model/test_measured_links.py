"""Links: measured between two processes in small, fitted, and put into prices."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from autopar.cluster.curves import crossing, fit
from autopar.cluster.measured import measured_on
from autopar.cluster.mesh_shapes import kinds_of_axes, parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cluster.profile import Overlap, Profile, Sent
from autopar.cost_model.collectives import collective_s
from autopar.errors import ClusterError
from autopar.ir.mesh import Axis, Cluster
from autopar.runtime.measuring.cases import cases
from tests.cost_model.test_measured import made_up
from tests.runtime.spawn import spawn

KINDS = ("all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter")
SIZES = tuple(4**k for k in range(5, 14))


def law_s(level: int, kind: str, ranks: int, num_bytes: int) -> float:
    """Between nodes slower, more so among more ranks."""
    start_s, byte_s = (2e-3, 1e-8) if level else (1e-4, 1e-9)
    seconds = start_s * ranks + byte_s * (1 + KINDS.index(kind)) * num_bytes
    return seconds + 0.3 * (start_s * byte_s * num_bytes) ** 0.5


def lab(text: str = "2x4xcpu") -> Profile:
    """What would be measured on a cluster whose links follow the law."""
    cluster = parse_cluster(text)
    sent = tuple(
        Sent(
            axis.level,
            kind,
            axis.ranks,
            axis.sides,
            axis.shared,
            size,
            round(law_s(axis.level, kind, axis.ranks, size) * 1e9),
        )
        for axis in kinds_of_axes(cluster)
        for kind in KINDS
        for size in SIZES
    )
    return msgspec.structs.replace(
        made_up(kind="cpu"),
        cluster=text,
        sizes=tuple(level.size for level in cluster.levels),
        collectives=sent,
        overlaps=(Overlap(0, 1000, 800, 1400), Overlap(1, 1000, 2000, 2000)),
    )


def seconds(kind: str, num_bytes: int, axis: Axis) -> float:
    given = num_bytes // axis.size if kind == "all_gather" else num_bytes
    brought = num_bytes // axis.size if kind == "reduce_scatter" else num_bytes
    return float(collective_s(kind, given, brought, axis))


def law_points(start_s: float, byte_s: float, root_s: float) -> list[tuple[int, float]]:
    return [(v, start_s + byte_s * v + root_s * v**0.5) for v in SIZES]


@pytest.mark.parametrize("law", [(1e-5, 1e-9, 0.0), (1e-3, 4e-9, 2e-6), (2e-4, 1e-8, 1e-5)])
def test_fit_finds_the_law(law: tuple[float, float, float]) -> None:
    found = fit(law_points(*law))
    assert (found.start_s, 1 / found.bytes_per_s) == pytest.approx(law[:2], rel=1e-3)
    assert found.root_s == pytest.approx(law[2], rel=1e-2, abs=1e-9)
    assert max(found.errors) < 1e-4


def test_a_disturbed_point_does_not_bend_the_law() -> None:
    points = law_points(1e-4, 1e-9, 1e-7)
    points[3] = points[3][0], 20 * points[3][1]
    points[-1] = points[-1][0], 1.5 * points[-1][1]
    found = fit(points)
    assert found.start_s == pytest.approx(1e-4, rel=0.05)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_no_figure_of_a_fit_is_zero_or_negative() -> None:
    draw = random.Random(0)
    for _ in range(50):
        points = [(v, draw.uniform(1e-5, 1e-2)) for v in SIZES[: draw.randint(1, 9)]]
        found = fit(points)
        assert found.start_s > 0
        assert found.bytes_per_s > 0
        assert found.root_s >= 0
    with pytest.raises(ValueError, match="no point"):
        fit([])


def test_kinds_of_axes_are_those_that_meshes_have() -> None:
    found = kinds_of_axes(parse_cluster("2x4xcpu"))
    assert [(axis.level, axis.sides, axis.shared, axis.stride) for axis in found] == [
        (0, 2, 1, 1),
        (0, 4, 1, 1),
        (1, 2, 1, 4),
        (1, 2, 2, 2),
        (1, 2, 4, 1),
    ]
    assert found[3].groups(8) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert kinds_of_axes(parse_cluster("1xcpu")) == ()
    assert [axis.sides for axis in kinds_of_axes(parse_cluster("6xcpu"))] == [2, 3, 6]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("mesh", ["8", "2x4", "4x2", "2x2x2"])
@pytest.mark.parametrize("kind", KINDS)
def test_price_gives_measured_collectives_back(kind: str, mesh: str) -> None:
    cluster = measured_on(parse_cluster("2x4xcpu"), lab())
    for axis in parse_mesh(mesh, cluster):
        level = int(axis.size * axis.shared > 4 or axis.inner is not None or axis.name == "dp")
        for size in SIZES[2:]:
            measured_s = law_s(level, kind, axis.size, size)
            if kind == "all_reduce":
                parts = "reduce_scatter", "all_gather"
                measured_s = min(
                    measured_s, sum(law_s(level, part, axis.size, size) for part in parts)
                )
            assert seconds(kind, size, axis) == pytest.approx(measured_s, rel=0.01)


def test_a_larger_cluster_takes_the_links_of_a_small_one() -> None:
    cluster = measured_on(parse_cluster("16x4xcpu"), lab())
    (dp, tp) = parse_mesh("16x4", cluster)
    assert seconds("all_gather", 2**20, tp) == pytest.approx(
        law_s(0, "all_gather", 4, 2**20), rel=0.01
    )
    assert seconds("all_gather", 2**20, dp) > law_s(1, "all_gather", 2, 2**20)
    inner = lab("4xcpu")
    assert (
        measured_on(parse_cluster("16x4xcpu"), inner).levels[0]
        == (parse_cluster("16x4xcpu").levels[0])
    )


def test_contention_is_the_part_of_the_shorter_that_nothing_hides() -> None:
    outer, inner = measured_on(parse_cluster("2x4xcpu"), lab()).levels
    assert inner.link.contention == pytest.approx(0.5)
    assert outer.link.contention == 0


def test_links_outside_are_never_faster_than_those_inside() -> None:
    base = lab()
    swapped = tuple(
        msgspec.structs.replace(each, time_ns=each.time_ns // (50**each.level))
        for each in base.collectives
    )
    outer, inner = measured_on(
        parse_cluster("2x4xcpu"), msgspec.structs.replace(base, collectives=swapped)
    ).levels
    assert outer.link.bytes_per_s < inner.link.bytes_per_s
    (axis,) = parse_mesh("8", replace(parse_cluster("2x4xcpu"), levels=(outer, inner)))
    assert seconds("permute", 2**20, axis) == pytest.approx(
        law_s(1, "permute", 8, 2**20) / 50, rel=0.01
    )


def described(path: Path, profile: Profile) -> Cluster:
    profile.save(path)
    return parse_cluster(str(path))


def test_a_profile_is_a_cluster(tmp_path: Path) -> None:
    found = described(tmp_path / "lab.json", lab())
    assert (found.name, found.num_devices) == ("lab", 8)
    assert "of Device of the test" in found.device.source
    with pytest.raises(ClusterError, match="Device of the test, which is no preset: describe"):
        described(tmp_path / "lab.json", msgspec.structs.replace(lab(), cluster="other.json"))


@pytest.mark.processes
def test_two_processes_are_measured() -> None:
    first, second = spawn("tests.cost_model.profile_workers.measure", 2)
    assert first == second
    found = Profile.from_bytes(str(first).encode())
    assert (found.sizes, found.cluster) == ((2, 1), "2x1xcpu")
    wanted = [(kind, size) for kind in KINDS for size in cases("cpu", quick=True).messages]
    assert sorted((each.kind, each.num_bytes) for each in found.collectives) == wanted
    assert {(each.level, each.sides, each.shared) for each in found.collectives} == {(1, 2, 1)}
    assert [each.level for each in found.overlaps] == [1]
    (axis,) = parse_mesh("2", measured_on(parse_cluster(found.cluster), found))
    assert {curve.kind for curve in axis.crossed.curves} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_crosses_is_no_more_than_all(kind: str) -> None:
    times, adapters = crossing(kind, 8, 2, 4)
    assert 0 < times <= 2
    assert adapters in (1, 4)
