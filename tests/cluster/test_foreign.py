"""What is given for a cluster and is none: errors say what it is, and what to write works."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.cluster.devices import DEVICES, preset_of
from autopar.cluster.parsing import parse_cluster
from autopar.cluster.profile import Profile
from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster


def refusal(given: str | Path) -> str:
    """What the error says."""
    with pytest.raises(ClusterError) as error:
        parse_cluster(str(given))
    return str(error.value)


def written(said: str) -> Cluster:
    """The cluster that an error says to write."""
    found = re.search(r"write ((?:\d+x)+[\w-]*\w)", said)
    assert found is not None, said
    return parse_cluster(found[1])


def described(said: str, folder: Path) -> Cluster:
    """The cluster of the file that an error says to write."""
    lines = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    assert lines, said
    path = folder / "described.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return parse_cluster(str(path))


def sizes(cluster: Cluster) -> tuple[int, ...]:
    return tuple(level.size for level in cluster.levels)


def holding(folder: Path, text: str | bytes, name: str = "given.txt") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def topology(links: Sequence[Sequence[str]], underline: bool = False) -> str:
    """What `nvidia-smi topo -m` prints of GPUs with these links, and an adapter."""
    names = [f"GPU{k}" for k in range(len(links))]
    head = "\t".join([*names, "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    head = f"\x1b[4m{head}\x1b[0m" if underline else head
    rows = [
        "\t".join(
            [name, *(" X " if link == "X" else link for link in row), "SYS", "0-51", "0", "N/A"]
        )
        for name, row in zip(names, links, strict=True)
    ]
    nic = "\t".join(["NIC0", *["SYS"] * len(links), " X "])
    legend = "Legend:\n\n  X    = Self\n  NV#  = Connection over # NVLinks\n"
    return "\t" + "\n".join([head, *rows, nic, "", legend])


def all_to_all(num: int, link: str) -> list[list[str]]:
    return [["X" if i == j else link for j in range(num)] for i in range(num)]


@pytest.mark.parametrize(
    ("link", "device", "preset"),
    [("NV18", "H100", "NVLink 4"), ("NV12", "A100", "NVLink 3"), ("NV6", "V100", "NVLink 2")],
)
@pytest.mark.parametrize("underline", [False, True])
def test_a_topology(tmp_path: Path, link: str, device: str, preset: str, underline: bool) -> None:
    said = refusal(holding(tmp_path, topology(all_to_all(8, link), underline), "topo.txt"))
    assert "topo.txt' is what `nvidia-smi topo -m` prints of 8 GPUs" in said
    assert f"joined by {link}, {link[2:]} NVLinks each" in said
    cluster = described(said, tmp_path)
    assert (sizes(cluster), cluster.device.name) == ((8,), device)
    assert cluster.levels == parse_cluster(f"8x{device}").levels
    assert cluster.levels[0].link.name == preset


def test_a_topology_of_another_number_of_links(tmp_path: Path) -> None:
    said = refusal(holding(tmp_path, topology(all_to_all(8, "NV8"))))
    assert described(said, tmp_path).levels[0].link.bytes_per_s == 200e9


def test_a_topology_of_pairs(tmp_path: Path) -> None:
    """NVLink bridges join two and two; what is between them has a level of its own."""
    pairs = [
        ["X" if i == j else "NV4" if i // 2 == j // 2 else "SYS" for j in range(4)]
        for i in range(4)
    ]
    said = refusal(holding(tmp_path, topology(pairs)))
    cluster = described(said, tmp_path)
    assert sizes(cluster) == (2, 2)
    assert [level.link.name for level in cluster.levels] == ["PCIe 4 x16", "NVLink 3"]
    assert cluster.levels[1].link.bytes_per_s == 100e9


@pytest.mark.parametrize("link", ["PHB", "SYS", "PIX", "NODE"])
def test_a_topology_without_nvlink(tmp_path: Path, link: str) -> None:
    said = refusal(holding(tmp_path, topology(all_to_all(4, link))))
    assert f"They are joined by {link}" in said
    cluster = described(said, tmp_path)
    assert (sizes(cluster), cluster.levels[0].link.name) == ((4,), "PCIe 4 x16")


def test_topologies_that_are_uneven_alone_or_cut_off(tmp_path: Path) -> None:
    cube = all_to_all(4, "NV2")
    cube[0][1] = cube[1][0] = "NV1"
    said = refusal(holding(tmp_path, topology(cube)))
    assert "joined by NV1, NV2" in said and sizes(described(said, tmp_path)) == (4,)
    said = refusal(holding(tmp_path, topology([["X"]])))
    assert "There is one" in said and sizes(described(said, tmp_path)) == (1,)
    lines = topology(all_to_all(8, "NV18")).splitlines()
    said = refusal(holding(tmp_path, "\n".join(lines[:4])))
    assert "8 GPUs, cut off" in said and sizes(written(said)) == (8,)


@pytest.mark.parametrize(
    ("text", "what", "expected"),
    [
        ("worker-1 slots=8\nworker-2 slots=8\n", "a hostfile of 2 hosts with 8 slots", (2, 8)),
        ("# ours\n\n10.0.0.1 slots=4 max_slots=4\n", "a hostfile of 1 hosts with 4", (4,)),
        ("a max-slots=8 slots=4\nb slots=4", "a hostfile of 2 hosts with 4", (2, 4)),
        ("node1:8\nnode2:8\nnode3:8", "a hostfile of 3 hosts with 8", (3, 8)),
        ("user@n1 slots=8\nuser@n2 slots=4", "2 hosts with 4 and 8 slots", (2, 4)),
        ("node-1\nnode-1\nnode-2\nnode-2\n", "a hostfile of 2 hosts with 2 slots", (2, 2)),
        ("node-1\nnode-2 # spare\nnode-3\n", "a list of 3 hosts", (3, 8)),
        ("localhost\n", "a list of 1 hosts", (8,)),
        ("node[01-04,07]\n", "a list of 5 hosts, as Slurm writes it", (5, 8)),
        ("2x4xA100\n", "holds a cluster's text, and no cluster. Write 2x4xA100.", None),
        ("GPU 0: NVIDIA L4 (UUID: 1)\nGPU 1: NVIDIA L4 (UUID: 2)", "NVIDIA L4: write", (2,)),
        ("GPU 0: NVIDIA L4 (UUID: a)\nGPU 1: Tesla T4 (UUID: b)", "several kinds", None),
        ('device = "H100"\nlevels = [{size = 8}]', "a name that ends in .toml", None),
        ("", "is an empty file", None),
        (" \n", "is an empty file", None),
        (b"\x00\x01", "is a binary file", None),
        (b"\xff\xfe\xfa", "is a binary file", None),
        ("some words about nothing\n", "is a file of another kind", None),
        ("name,memory\nH100,80\n", "is a file of another kind", None),
    ],
)  # fmt: skip
def test_other_files(
    tmp_path: Path, text: str | bytes, what: str, expected: tuple[int, ...] | None
) -> None:
    said = refusal(holding(tmp_path, text))
    assert what in said
    if expected is not None:
        assert sizes(written(said)) == expected


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("topo.txt").startswith(
        "cluster 'topo.txt' is no cluster, and no file: write for"
    )
    assert "and no file" in refusal("no/such/hostfile")
    assert "is a folder" in refusal(tmp_path)
    assert "unknown device 'hostfile'" in refusal("hostfile")
    holding(tmp_path, "n1 slots=2\nn2 slots=2", "hostfile")
    assert "is a hostfile" in refusal("hostfile")


def test_a_file_cannot_take_the_place_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    holding(tmp_path, "n1 slots=2", "8xH100")
    assert sizes(parse_cluster("8xH100")) == (8,)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "lab.toml is an empty file"),
        (b"\x00", "lab.toml is a binary file"),
        ("n1 slots=8\nn2 slots=8", "is a hostfile of 2 hosts with 8 slots.* write 2x8xH100"),
        ("device = ", "lab.toml: Invalid value"),
        ("# nothing", "lab.toml describes nothing"),
        ("size = 3", "unknown field `size`"),
    ],
)
def test_cluster_files_that_are_none(tmp_path: Path, text: str | bytes, what: str) -> None:
    assert re.search(what, refusal(holding(tmp_path, text, "lab.toml")))


@pytest.mark.parametrize(
    ("text", "num", "expected"),
    [
        ("node[01-04,07]", 5, (5, 8)),
        ("gpu-[1-2]-[3-5]x,login1", 7, (7, 8)),
        ("node1,node2", 2, (2, 8)),
        ("a[5]", 1, (8,)),
    ],
)
def test_lists_of_nodes(text: str, num: int, expected: tuple[int, ...]) -> None:
    said = refusal(text)
    assert f"is a list of {num} hosts, as Slurm writes it" in said
    assert sizes(written(said)) == expected


def trace(world_size: int, num_devices: int, name: str = "NVIDIA H100 80GB HBM3") -> bytes:
    devices = [
        {"id": k, "name": name, "totalGlobalMem": 85_000_000_000} for k in range(num_devices)
    ]
    content = {"schemaVersion": 1, "deviceProperties": devices}
    if world_size > 1:
        content["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": world_size}
    event = {"ph": "X", "name": "aten::mm", "ts": 1.5, "dur": 2.0}
    return json.dumps(content | {"traceEvents": [event] * 9}).encode()


@pytest.mark.parametrize(
    ("data", "expected", "device"),
    [
        (trace(16, 8), (2, 8), "H100"),
        (trace(8, 8), (8,), "H100"),
        (trace(1, 8), (1,), "H100"),
        (trace(4, 0), (4,), "cpu"),
        (trace(16, 8)[:-40], (2, 8), "H100"),
        (gzip.compress(trace(16, 8)), (2, 8), "H100"),
    ],
)
@pytest.mark.parametrize("name", ["trace.json", "trace.pt.trace", "trace.json.gz"])
def test_a_trace(
    tmp_path: Path, data: bytes, expected: tuple[int, ...], device: str, name: str
) -> None:
    path = holding(tmp_path, data, name)
    said = refusal(path)
    assert "a trace of one run, as torch.profiler exports it" in said
    cluster = written(said)
    assert sizes(cluster) == expected
    assert cluster.device.name == device
    with pytest.raises(ClusterError, match=r"trace of one run.*`autopar profile` measures one"):
        Profile.load(path)


def test_other_traces(tmp_path: Path) -> None:
    said = refusal(holding(tmp_path, trace(9, 8)))
    assert "9 ranks on nodes of 8 devices" in said
    said = refusal(holding(tmp_path, trace(8, 8, "Some GPU")))
    assert "8 ranks on 1 nodes, with Some GPU: write 8xH100, with the name" in said
    assert "trace" in refusal(holding(tmp_path, '[{"name": "a", "ph": "X"}]', "events.json"))


def test_profiles_that_are_none(tmp_path: Path) -> None:
    for text, what in (
        ("n1 slots=8", "is a hostfile.*`autopar profile` measures one"),
        ("", "is an empty file; `autopar profile` measures one"),
        ('{"schema": 99}', "schema version 99"),
        ("{}", "not a profile: it has no schema version"),
    ):
        with pytest.raises(ClusterError, match=what):
            Profile.load(holding(tmp_path, text))
    with pytest.raises(ClusterError, match="is a folder"):
        Profile.load(tmp_path)
    with pytest.raises(ClusterError, match=r"cannot read profile .*No such file"):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "alone", "together"),
    [
        ("2xL4+2xA10G", ("2xL4", "2xA10G"), "4x1xL4"),
        ("2xL4,2xA10G", ("2xL4", "2xA10G"), "4x1xL4"),
        ("8xH100;8xA100", ("8xH100", "8xA100"), "16x1xA100"),
        ("2x8xH100 + 4xA100-40G", ("2x8xH100", "4xA100-40G"), "20x1xA100-40G"),
        ("H100,A100", ("H100", "A100"), "2x1xA100"),
        ("8xH100 and 8xH200", ("8xH100", "8xH200"), "16x1xH100"),
        ("2xL4+2xFOO", ("2xL4",), "4x1xL4"),
    ],
)
def test_devices_of_several_kinds(text: str, alone: tuple[str, ...], together: str) -> None:
    said = refusal(text)
    assert said.startswith(f"cluster {text!r} has devices of several kinds, and a cluster has one")
    assert f"({' and '.join(alone)})" in said
    assert together in said
    for remedy in (*alone, together):
        assert parse_cluster(remedy).num_devices


def test_parts_of_one_kind() -> None:
    assert sizes(written(refusal("8xH100+8xH100"))) == (2, 8)
    assert sizes(written(refusal("8xH100,4xH100"))) == (12, 1)


@pytest.mark.parametrize(
    ("text", "like", "name"),
    [
        ("8x8xH999", "H200", "H999"),
        ("8xH1000", "H100", "H1000"),
        ("A1000", "A100", "A1000"),
        ("4xRTX5090", "RTX4090", "RTX5090"),
        ("2x8xMI325X", "MI300X", "MI325X"),
        ('3xs"[]\x7fé', None, 's"[]é'),
    ],
)
def test_an_unknown_device_is_described(
    tmp_path: Path, text: str, like: str | None, name: str
) -> None:
    """By lines that are a cluster file: that of the device with the nearest name."""
    said = refusal(text)
    assert "unknown device" in said
    cluster = described(said, tmp_path)
    assert cluster.device.name == name
    known = DEVICES[like] if like is not None else None
    if known is not None:
        assert cluster.device.flops_per_s == known.flops_per_s
        assert cluster.device.memory_bytes == known.memory_bytes
        assert cluster.device.memory_bytes_per_s == pytest.approx(known.memory_bytes_per_s)
        assert f"{like}, the nearest name" in said
        of_preset = parse_cluster("x".join([*map(str, sizes(cluster)), like]))
        assert cluster.levels == of_preset.levels


def test_an_unknown_device_in_a_file_is_described(tmp_path: Path) -> None:
    said = refusal(
        holding(tmp_path, 'device = "H999"\nlevels = [{size = 2}, {size = 4}]', "lab.toml")
    )
    assert sizes(described(said, tmp_path)) == (2, 4)


@pytest.mark.parametrize(
    ("name", "memory_bytes", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, "H100"),
        ("NVIDIA H100 80GB HBM3", None, "H100"),
        ("NVIDIA H100 PCIe", None, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", None, "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", None, "A100"),
        ("NVIDIA GeForce RTX 4090", None, "RTX4090"),
        ("Some GPU", None, None),
    ],
)
def test_presets_by_what_drivers_say(
    name: str, memory_bytes: int | None, preset: str | None
) -> None:
    assert preset_of(name, memory_bytes) == preset
