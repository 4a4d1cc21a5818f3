"""The presets as data: complete, sourced, and consistent with each other."""

from __future__ import annotations

from math import isfinite

import pytest

from autopar.cluster.devices import ALIASES, DEVICES
from autopar.cluster.links import LINK_ALIASES, LINKS, SHARED_LINKS
from autopar.cluster.parsing import parse_cluster
from autopar.cluster.presets import SYSTEMS
from autopar.ir.redistribute import KINDS

EXPECTED = (
    "A100", "A100-40G", "H100", "H100-PCIe", "H200", "GH200", "B200", "GB200", "B300", "GB300",
    "MI300X", "V100", "T4", "L4", "L40S", "A10G", "RTX3090", "RTX4090", "RTX6000Ada", "RTXPRO6000",
    "cpu",
)  # fmt: skip
NETWORKS = (
    "InfiniBand HDR 200", "InfiniBand NDR 400", "InfiniBand XDR 800", "EFA v2", "EFA v3",
    "RoCE 200", "RoCE 400", "Ethernet 1G", "Ethernet 10G", "Ethernet 25G", "Ethernet 100G",
)  # fmt: skip


def test_the_promised_devices_and_networks_are_there() -> None:
    assert set(DEVICES) == set(SYSTEMS) == set(EXPECTED)
    assert set(ALIASES.values()) <= set(DEVICES)
    assert set(LINK_ALIASES.values()) <= set(LINKS) >= set(NETWORKS)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_other_names_are_read(alias: str, name: str) -> None:
    assert parse_cluster(f"8x{alias.lower()}") == parse_cluster(f"8x{name}")


@pytest.mark.parametrize("name", EXPECTED)
def test_every_figure_is_positive_and_sourced(name: str) -> None:
    device, system = DEVICES[name], SYSTEMS[name]
    assert device.name == name
    assert {"float32", "float64", "float16"} <= set(dict(device.flops_per_s))
    figures = [device.memory_bytes, device.memory_bytes_per_s, device.launch_s]
    figures += [rate for _, rate in device.flops_per_s]
    figures += [system.host.memory_bytes, system.host.bytes_per_s, system.host.latency_s]
    assert all(isfinite(figure) and figure > 0 for figure in figures)
    assert device.source and system.host.source
    assert {system.node_link, system.network_link} <= set(LINKS)


def test_links_are_sourced() -> None:
    assert set(LINKS) >= SHARED_LINKS
    for name, link in LINKS.items():
        assert link.name == name and link.source
        assert link.bytes_per_s > 0 and link.latency_s > 0 and link.start_s > 0
        assert 0 < link.efficiency <= 1
        curves = [(curve.kind, curve.ranks) for curve in link.curves]
        assert len(set(curves)) == len(curves) and {kind for kind, _ in curves} <= set(KINDS)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "cpu"])
def test_a_gpu_computes_fastest_in_half_and_leaves_its_node_slowly(name: str) -> None:
    device = DEVICES[name]
    assert device.peak("float64") <= device.peak("float32") < device.peak("float16")
    outer, inner = parse_cluster(f"2x8x{name}").levels
    assert outer.link.bytes_per_s < inner.link.bytes_per_s < device.memory_bytes_per_s


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("A100", "bfloat16", 312e12),
        ("A100", "float32", 19.5e12),
        ("H100", "bfloat16", 989.4e12),
        ("H100", "float32", 67e12),
        ("B200", "bfloat16", 2250e12),
        ("V100", "float16", 125e12),
        ("V100", "bfloat16", 15.7e12),
        ("L4", "bfloat16", 121e12),
        ("RTX3090", "bfloat16", 71e12),
        ("RTX4090", "bfloat16", 165.2e12),
    ],
)
def test_rates_are_dense_and_outside_tensor_cores_for_float32(
    name: str, dtype: str, rate: float
) -> None:
    assert DEVICES[name].peak(dtype) == rate


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "cpu"])
def test_a_device_alone_in_its_node_shares_no_link_to_the_host(name: str) -> None:
    alone, beside = parse_cluster(name).host, parse_cluster(f"8x{name}").host
    assert parse_cluster(f"2x1x{name}").host == alone
    assert alone.bytes_per_s >= beside.bytes_per_s
    assert (alone.bytes_per_s > beside.bytes_per_s) == ("two share" in beside.source)
