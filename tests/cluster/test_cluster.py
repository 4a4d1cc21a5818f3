"""Cluster texts and files: what they mean, that they round-trip, and how they fail."""

from __future__ import annotations

from math import isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster.devices import DEVICES
from autopar.cluster.links import LINKS
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import MAX_DEVICES, parse_cluster
from autopar.cost_model.collectives import collective_s
from autopar.errors import ClusterError
from autopar.ir.mesh import Axis, Cluster, Curve, Level, Link


@pytest.mark.parametrize(
    ("text", "sizes", "links", "device"),
    [
        ("8xH100", (8,), ("NVLink 4",), "H100"),
        ("H100", (1,), ("NVLink 4",), "H100"),
        ("64x8xH100", (64, 8), ("InfiniBand NDR 400", "NVLink 4"), "H100"),
        ("1x8xh100", (1, 8), ("InfiniBand NDR 400", "NVLink 4"), "H100"),
        ("2x4xA100", (2, 4), ("InfiniBand HDR 200", "NVLink 3"), "A100"),
        ("8xh100 pcie", (8,), ("PCIe 5 x16",), "H100-PCIe"),
        ("72xGB200", (72,), ("NVLink 5",), "GB200"),
        ("2X4Xa100-40g", (2, 4), ("InfiniBand HDR 200", "NVLink 3"), "A100-40G"),
        ("8xA100-80G", (8,), ("NVLink 3",), "A100"),
        ("4xcpu", (4,), ("gloo loopback",), "cpu"),
        (" 2 x RTX 4090 ", (2,), ("PCIe 4 x16",), "RTX4090"),
        ("64xH100", (64,), ("NVLink 4",), "H100"),
    ],
)
def test_texts(text: str, sizes: tuple[int, ...], links: tuple[str, ...], device: str) -> None:
    cluster = parse_cluster(text)
    assert tuple(level.size for level in cluster.levels) == sizes
    assert tuple(level.link.name for level in cluster.levels) == links
    assert cluster.device == DEVICES[device]
    assert parse_cluster(cluster.name) == cluster


def test_a_nodes_network_adapter_is_shared_by_its_devices() -> None:
    whole = LINKS["Ethernet 100G"].bytes_per_s
    assert parse_cluster("2x8xL4").levels[0].link.bytes_per_s == whole / 8
    assert parse_cluster("2x1xL4").levels[0].link == LINKS["Ethernet 100G"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH1000", "unknown device 'H1000' .*known: A100, .*did you mean H100"),
        ("8xFOO", r"unknown device 'FOO' \(known: .*cpu\). Describe it"),
        ("0xH100", "'0' is not a size"),
        ("8x", "names no device"),
        ("", "names no device"),
        ("2x2x2xH100", "3 levels.*toml"),
        ("99999999999999xH100", "is not a size"),
        (f"{MAX_DEVICES}x2xH100", "number of devices is 2000000"),
        ("no/such/file.toml", "no/such/file.toml cannot be read: No such file"),
        ("\0.toml", "cannot be read"),
    ],
)
def test_texts_refused(text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_cluster(text)


@given(st.text() | st.from_regex(r"\A(\d{0,3}x){0,3}(H100|h20|cpu|B200| )\Z"))
def test_any_text_is_a_cluster_or_refused(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except ClusterError:
        return
    assert parse_cluster(cluster.name) == cluster


LAB = """
name = "lab"
device = "H100"

[[levels]]
size = 3
link = "InfiniBand HDR 200"

[[levels]]
size = 2

[[levels]]
size = 8
link.name = "switch"
link.bytes_per_s = "400GB/s"
link.latency_s = 2e-6
link.start_s = "14us"
link.efficiency = 0.8
link.source = "measured"

[host]
memory_bytes = "64GiB"
"""


def read(folder: Path, text: str) -> Cluster:
    path = folder / "site.toml"
    path.write_text(text, encoding="utf-8")
    return parse_cluster(str(path))


def test_a_file_overrides_presets(tmp_path: Path) -> None:
    cluster = read(tmp_path, LAB)
    assert cluster.name == "lab" and cluster.num_devices == 48
    assert cluster.device == DEVICES["H100"]
    assert cluster.levels == (
        Level(3, LINKS["InfiniBand HDR 200"]),
        Level(2, LINKS["InfiniBand NDR 400"]),
        Level(8, Link("switch", 400e9, 2e-6, 14e-6, "measured", 0.8)),
    )
    assert cluster.host.memory_bytes == 64 * 2**30
    assert cluster.host.bytes_per_s == parse_cluster("2x8xH100").host.bytes_per_s
    assert cluster.host.source.endswith("; changed: memory_bytes")


def test_a_file_overrides_a_device_and_a_link(tmp_path: Path) -> None:
    cluster = read(
        tmp_path,
        """
        device = {preset = "a100", memory_bytes = "70GB", flops_per_s = {bfloat16 = 250e12}}
        [[levels]]
        size = 4
        link = {preset = "NVLink 3", bytes_per_s = "235GB/s"}
        """,
    )
    assert cluster.name == "site"
    assert cluster.device.memory_bytes == 70 * 10**9
    assert cluster.device.peak("bfloat16") == 250e12
    assert cluster.device.peak("float16") == 312e12
    assert cluster.device.source.endswith("; changed: flops_per_s, memory_bytes")
    assert cluster.levels[0].link.bytes_per_s == 235e9
    assert cluster.levels[0].link.latency_s == LINKS["NVLink 3"].latency_s


def test_a_link_keeps_its_measured_collectives_unless_it_is_described_anew(tmp_path: Path) -> None:
    def link(text: str) -> Link:
        return (
            read(tmp_path, f"device = 'H100'\n[[levels]]\nsize = 4\nlink = {text}").levels[0].link
        )

    known = LINKS["NVLink 4"]
    assert link("{preset = 'NVLink 4', bytes_per_s = 2e11}").curves == known.curves
    assert link("{preset = 'NVLink 4', start_s = 1e-5}").curves == ()
    given = "{kind = 'all_gather', ranks = 8, start_s = '10us', reach = 0.8, knee = 1}"
    curve = Curve("all_gather", 8, 1e-5, 0.8, 1)
    assert link(f"{{preset = 'NDR', efficiency = 0.9, curves = [{given}]}}").curves == (curve,)


@pytest.mark.parametrize(("preset", "shared"), [("Ethernet 25G", 8), ("NDR", 1)])
def test_a_rate_of_ethernet_is_that_of_a_node(tmp_path: Path, preset: str, shared: int) -> None:
    text = f"""
        device = "H100"
        [[levels]]
        size = 2
        link = {{preset = "{preset}", bytes_per_s = "400MB/s"}}
        [[levels]]
        size = 8
        """
    outer = read(tmp_path, text).levels[0].link
    assert outer.bytes_per_s == 400e6 / shared


LINKS_OF_CPUS = (
    "'Ethernet 1G'",
    "'NDR'",
    "'PCIe 5'",
    "{preset = 'Ethernet 10G', bytes_per_s = '20MB/s'}",
    "{preset = 'Ethernet 10G', efficiency = 0.5}",
    "{name = 'own', bytes_per_s = 1e8, latency_s = 1e-4, start_s = 0, source = 'stated'}",
)


@pytest.mark.parametrize("link", LINKS_OF_CPUS)
@pytest.mark.parametrize(("nodes", "inner"), [(2, 1), (3, 1), (8, 1), (2, 2), (2, 4), (64, 1)])
@pytest.mark.parametrize("num_bytes", [64, 2**20, 10**8])
def test_gloo_reduces_and_scatters_as_it_all_reduces(
    tmp_path: Path, link: str, nodes: int, inner: int, num_bytes: int
) -> None:
    """Between nodes of CPUs, where nothing was measured: in rings, of which each step takes what
    gloo takes."""
    levels = f"[[levels]]\nsize = {nodes}\nlink = {link}\n[[levels]]\nsize = {inner}\n"
    cluster = read(tmp_path, f"device = 'cpu'\n{levels}")
    (axis,) = parse_mesh(str(nodes * inner), cluster)
    whole = num_bytes * axis.size
    reduced = collective_s("all_reduce", whole, whole, axis)
    assert isclose(collective_s("reduce_scatter", whole, num_bytes, axis), reduced)
    assert reduced >= 2 * (axis.size - 1) * (1e-4 if "own" in link else 0.6e-3)


def test_no_process_sends_faster_by_gloo_than_within_a_machine(tmp_path: Path) -> None:
    """A faster network never takes longer, and its rate may be stated."""
    seconds: list[float] = []
    for link in ("'1G'", "'10G'", "'25G'", "'100G'", "{preset = '100G', bytes_per_s = '25GB/s'}"):
        text = f"device = 'cpu'\n[[levels]]\nsize = 2\nlink = {link}"
        axis = Axis("x", 2, read(tmp_path, text).levels[0].link)
        seconds.append(collective_s("all_reduce", 4 * 10**8, 4 * 10**8, axis))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == seconds[-2] > 4e8 / LINKS["gloo loopback"].bytes_per_s


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_that_is_none_is_named_where_a_rate_is_shared(tmp_path: Path, size: int) -> None:
    with pytest.raises(ClusterError, match=rf"levels\[1\]\.size is {size}"):
        read(
            tmp_path,
            f"""
            device = "cpu"
            [[levels]]
            size = 2
            link = {{preset = "10G", bytes_per_s = "1GB/s"}}
            [[levels]]
            size = {size}
            """,
        )


LEVEL = "[[levels]]\nsize = 2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device = ", "site.toml: Invalid value"),
        ("", "site.toml is an empty file"),
        ('device = "H100"', "missing required field `levels`"),
        ('device = "H100"\nlevels = []', "levels is empty"),
        ('device = "H10"\n' + LEVEL, "device: unknown device 'H10'.*did you mean H100"),
        ('device = "H100"\ncolour = 1\n' + LEVEL, "unknown field `colour`"),
        ('device = "H100"\n[[levels]]\nsize = "2"', r"levels\[0\].size"),
        ('device = "H100"\n[[levels]]\nsize = true', r"levels\[0\].size"),
        ('device = "H100"\n[[levels]]\nsize = 0', r"levels\[0\].size is 0"),
        ('device = "H100"\n' + LEVEL * 3, r"levels\[0\] has no link"),
        ('device = "H100"\n' + LEVEL + 'link = "NVLnk 4"', r"levels\[0\]: .*mean NVLink 4"),
        (
            'device = "H100"\n' + LEVEL + "link = {bytes_per_s = 1}",
            "link lacks name, latency_s, start_s",
        ),
        (
            'device = "H100"\n' + LEVEL + 'link = {preset = "NVLink 4", bytes_per_s = "450GB"}',
            r"levels\[0\].link.bytes_per_s: '450GB'.*25GB/s",
        ),
        (
            'device = "H100"\n' + LEVEL + 'link = {preset = "NVLink 4", bytes_per_s = 0}',
            r"levels\[0\].link.bytes_per_s is 0.0: it must be from 1000 to 1e\+21",
        ),
        (
            'device = "H100"\n' + LEVEL + 'link = {preset = "NVLink 4", latency_s = -1}',
            r"latency_s is -1.0: it must be from 0 to 1000",
        ),
        (
            'device = {preset = "H100", memory_bytes = nan}\n' + LEVEL,
            "site.toml, device.memory_bytes: this is no number that can be used: nan",
        ),
        (
            'device = "H100"\n' + LEVEL + 'link = {preset = "NVLink 4", efficiency = 0}',
            r"levels\[0\].link.efficiency is 0.0: it must be from 0.001 to 10",
        ),
        (
            'device = "H100"\n' + LEVEL + 'link = {preset = "NDR", curves = [{kind = "gather", '
            "ranks = 2, start_s = 1, reach = 1, knee = 1}]}",
            r"site.toml: levels\[0\].link.curves\[0\].kind is 'gather': .* one of all_reduce",
        ),
        (
            'device = "H100"\n' + LEVEL + 'link = {preset = "NDR", curves = [{kind = "permute", '
            "ranks = 2, start_s = 1, reach = 0, knee = 1}]}",
            r"levels\[0\].link.curves\[0\].reach is 0.0",
        ),
        ('device = {name = "mine"}\n' + LEVEL, r"levels\[0\] has no link|device lacks kind"),
        (
            'device = {name = "d", kind = "cuda", flops_per_s = {bfloat16 = 1.0}, memory_bytes = 1,'
            ' memory_bytes_per_s = 1, launch_s = 0, source = "s"}\n'
            "host = {memory_bytes = 1, bytes_per_s = 1, latency_s = 0, source = 's'}\n"
            + LEVEL
            + 'link = "NVLink 4"',
            "without float32",
        ),
    ],
)
def test_files_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "figure",
    ["1e-320", "inf", "-inf", "nan", "-1", "0", "1e300", "true", '"1e-320"', '"fast"', "[]",
     "1" + "0" * 400, '"0GB/s"', "1" + "0" * 5000],
)  # fmt: skip
@pytest.mark.parametrize(
    "key",
    ["device.memory_bytes_per_s", "device.memory_bytes", "device.flops_per_s.float32",
     "levels[0].link.bytes_per_s", "levels[0].size"],
)  # fmt: skip
def test_odd_figures(tmp_path: Path, key: str, figure: str) -> None:
    """Each is refused in one sentence that names the file and the key."""
    given = {key: figure, "levels[0].size": "2"} | {key: figure}
    link = f", bytes_per_s = {figure}" if key.startswith("levels[0].link") else ""
    within = key.removeprefix("device.")
    device = f", {within} = {figure}" if key.startswith("device.") else ""
    text = (
        f'device = {{preset = "H100"{device}}}\n[[levels]]\nsize = {given["levels[0].size"]}\n'
        f'link = {{preset = "NVLink 4"{link}}}\n'
    )
    with pytest.raises(ClusterError) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert "site.toml" in said and len(said) < 400 and "\n" not in said
    named = "flops_per_s" if "flops" in key else key.rpartition(".")[2]
    assert named in said or "limit" in said


@pytest.mark.parametrize(
    "key", ["latency_s = inf", "start_s = nan", "latency_s = 1e300", "start_s = 1e17"]
)
def test_odd_times(tmp_path: Path, key: str) -> None:
    text = f'device = "H100"\n{LEVEL}link = {{preset = "NVLink 4", {key}}}\n'
    with pytest.raises(ClusterError, match=rf"site.toml.*levels\[0\].*{key.split()[0]}.*0 to 1000"):
        read(tmp_path, text)


def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="binary file"):
        parse_cluster(str(path))
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ClusterError, match="larger than"):
        parse_cluster(str(path))
