"""Meshes: which link an axis gets, which meshes are candidates, and what is refused."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.cluster.mesh_shapes import candidate_meshes, parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster, Level, Link, Mesh


def text_of(mesh: Mesh) -> str:
    return ", ".join(f"{axis.name}={axis.size} {axis.link.name}" for axis in mesh.axes)


@pytest.mark.parametrize(
    ("cluster", "text", "expected"),
    [
        ("8x8xH100", "8x8", "dp=8 InfiniBand NDR 400, tp=8 NVLink 4"),
        ("8x8xH100", "4x16", "dp=4 InfiniBand NDR 400, tp=16 InfiniBand NDR 400"),
        ("8x8xH100", "16x4", "dp=16 InfiniBand NDR 400, tp=4 NVLink 4"),
        ("8x8xH100", "64", "dp=64 InfiniBand NDR 400"),
        ("8x8xH100", "2x4x8", "dp=2 InfiniBand NDR 400, cp=4 InfiniBand NDR 400, tp=8 NVLink 4"),
        ("8x8xH100", "fsdp = 8, tp=8", "fsdp=8 InfiniBand NDR 400, tp=8 NVLink 4"),
        ("8xH100", "a=2,b=2,c=1,d=2", "a=2 NVLink 4, b=2 NVLink 4, d=2 NVLink 4"),
        ("8xH100", "1x8", "tp=8 NVLink 4"),
        ("1x8xH100", "8", "dp=8 NVLink 4"),
        ("H100", "1", ""),
        ("H100", "", ""),
        ("2x6xA100", "3x4", "dp=3 InfiniBand HDR 200, tp=4 InfiniBand HDR 200"),
        ("2x6xA100", "4x3", "dp=4 InfiniBand HDR 200, tp=3 NVLink 3"),
    ],
)
def test_parse(cluster: str, text: str, expected: str) -> None:
    assert text_of(parse_mesh(text, parse_cluster(cluster))) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4x4", "mesh '4x4' has 16 devices, but cluster 8xH100 has 8: .* multiply to 8"),
        ("", "has 1 device, but cluster 8xH100 has 8"),
        ("dp=2,tp=2", "has 4 devices"),
        ("dp=2,dp=4", "two axes named 'dp'"),
        ("dp=2,tp", "'tp' is not name=size"),
        ("dp=2,2=4", "'2=4' is not name=size"),
        ("dp=two,tp=4", "'two' is not a size"),
        ("0x8", "'0' is not a size"),
        ("2x-4", "'-4' is not a size"),
        ("8x", "'' is not a size"),
        ("auto", "'auto' is not a size"),
        ("2x2x2x1", "4 axes, and default names end at 3"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_mesh(text, parse_cluster("8xH100"))


@pytest.mark.parametrize(
    ("cluster", "max_axes", "expected"),
    [
        ("H100", 2, [""]),
        ("8xH100", 1, ["dp=8"]),
        ("8xH100", 2, ["dp=8", "dp=2,tp=4"]),
        ("8xH100", 3, ["dp=8", "dp=2,tp=4", "dp=2,cp=2,tp=2"]),
        ("7xH100", 3, ["dp=7"]),
        ("2x4xA100", 2, ["dp=8", "dp=2,tp=4", "dp=4,tp=2"]),
        (
            "8x8xH100",
            2,
            ["dp=64", "dp=2,tp=32", "dp=4,tp=16", "dp=8,tp=8", "dp=16,tp=4", "dp=32,tp=2"],
        ),
    ],
)
def test_candidates(cluster: str, max_axes: int, expected: list[str]) -> None:
    assert [str(m) for m in candidate_meshes(parse_cluster(cluster), max_axes)] == expected


@pytest.mark.parametrize("max_axes", [-1, 0, 4])
def test_candidates_refuse_more_axes_than_have_names(max_axes: int) -> None:
    with pytest.raises(ClusterError, match=f"1 to 3 axes, not {max_axes}"):
        candidate_meshes(parse_cluster("8xH100"), max_axes)


def build(levels: list[tuple[int, int]]) -> Cluster:
    """Levels of (size, bandwidth) around an H100."""
    base = parse_cluster("H100")
    built = tuple(
        Level(size, Link(f"link {k}", float(speed), 1e-6, 1e-6, "test"))
        for k, (size, speed) in enumerate(levels)
    )
    return Cluster("test", base.device, built, base.host)


clusters = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3).map(
    build
)


def slowest_crossed(cluster: Cluster, mesh: Mesh, axis: int) -> float:
    """By walking over every group: the slowest level on which two of its ranks differ."""
    sizes = [level.size for level in cluster.levels]
    places = list(product(*map(range, sizes)))
    return min(
        level.link.bytes_per_s
        for rank in range(mesh.num_devices)
        for k, level in enumerate(cluster.levels)
        if len({places[member][k] for member in mesh.group(rank, axis)}) > 1
    )


@given(clusters)
def test_an_axis_gets_the_slowest_link_its_groups_cross(cluster: Cluster) -> None:
    for mesh in candidate_meshes(cluster, 3):
        for k, axis in enumerate(mesh.axes):
            assert axis.link.bytes_per_s == slowest_crossed(cluster, mesh, k)


@given(clusters, st.integers(1, 3))
@example(build([(2, 1), (5, 2), (3, 1)]), 3)
def test_candidates_cover_and_do_not_repeat(cluster: Cluster, max_axes: int) -> None:
    """Whatever factorization one writes by hand has exactly one equivalent among the candidates."""
    meshes = candidate_meshes(cluster, max_axes)
    assert meshes == candidate_meshes(cluster, max_axes)

    def kind(mesh: Mesh) -> list[tuple[int, str, int, str]]:
        return sorted(
            (axis.size, axis.link.name, axis.shared, axis.inner.name if axis.inner else "")
            for axis in mesh.axes
        )

    kinds = list(map(kind, meshes))
    n = cluster.num_devices
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    written = {
        sizes
        for count in range(1, max_axes + 1)
        for sizes in product(divisors, repeat=count)
        if prod(sizes) == n
    } or {(1,)}
    for sizes in written:
        mesh = parse_mesh("x".join(map(str, sizes)), cluster)
        assert kinds.count(kind(mesh)) == 1
    for mesh in meshes:
        assert len(mesh.axes) <= max_axes
        assert mesh.num_devices == n
        assert parse_mesh(str(mesh), cluster) == mesh


def test_an_axis_over_nodes_knows_its_ranks_in_each() -> None:
    cluster = parse_cluster("8x8xH100")
    network, nvlink = (level.link for level in cluster.levels)
    (flat,) = parse_mesh("64", cluster).axes
    across, within = parse_mesh("8x8", cluster).axes
    assert (flat.link, flat.shared, flat.inner, flat.sides) == (network, 8, nvlink, 8)
    assert (across.link, across.shared, across.inner, across.sides) == (network, 1, None, 8)
    assert (within.link, within.shared, within.inner, within.sides) == (nvlink, 1, None, 8)
    straddling = parse_mesh("3x4", parse_cluster("2x6xA100")).axes[1]
    assert (straddling.shared, straddling.sides) == (2, 2)
