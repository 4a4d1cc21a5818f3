"""Systems that autopar knows by the name of their device: links in and between nodes, and the host.

A new device is one entry in each of `devices.DEVICES` and `SYSTEMS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Host


@dataclass(frozen=True, slots=True)
class System:
    """What usually stands around a device: links (by name) in and between nodes, and the host."""

    node_link: str
    network_link: str
    host: Host


def _system(
    node: str, network: str, memory_gb: float, ram_gb_per_s: float, gb_per_s: float, source: str
) -> System:
    """The host's share per device: its memory, what that reads and writes (all channels of the
    processors that such hosts have), and what copies to it come to."""
    source = f"{source}; latency: estimate; memory: {ram_gb_per_s:g} GB/s, estimate by channels"
    rates = gb_per_s * 1e9, 10e-6, source, ram_gb_per_s * 1e9
    return System(node, network, Host(round(memory_gb * 1e9), *rates))


_HDR, _NDR, _XDR, _TCP = (
    "InfiniBand HDR 200",
    "InfiniBand NDR 400",
    "InfiniBand XDR 800",
    "Ethernet 100G",
)
_PAIR = "one device alone copies at {} GB/s (measured), two share an uplink of the host"
_PCIE_4 = "25 GB/s, PCIe 4.0 x16 (measured 26 on an A100 node)"
_DGX_H = f"2 TB for 8 GPUs; {_PAIR.format(55.4)}"

SYSTEMS: dict[str, System] = {
    "A100": _system(
        "NVLink 3",
        _HDR,
        256,
        51.2,
        11,
        f"DGX A100 640GB: 2 TB for 8 GPUs; {_PAIR.format(26)}, measured 11",
    ),
    "A100-40G": _system(
        "NVLink 3",
        _HDR,
        128,
        51.2,
        6.1,
        "DGX A100 320GB: 1 TB for 8 GPUs; measured 6.1 GB/s with all 8 ranks at once (cloud)",
    ),
    "H100": _system("NVLink 4", _NDR, 256, 76.8, 27.7, f"DGX H100: {_DGX_H}"),
    "H100-PCIe": _system(
        "PCIe 5 x16", _NDR, 128, 76.8, 27.7, f"estimate: 1 TB for 8 GPUs; {_PAIR.format(57)}"
    ),
    "H200": _system("NVLink 4", _NDR, 256, 76.8, 27.7, f"DGX H200: {_DGX_H}"),
    "GH200": _system(
        "NVLink 4", _NDR, 480, 384, 360, "GH200: 480 GB; NVLink-C2C, estimate: 0.8 of 450 GB/s"
    ),
    "B200": _system("NVLink 5", _NDR, 256, 89.6, 27.7, f"DGX B200: {_DGX_H}"),
    "GB200": _system(
        "NVLink 5",
        _NDR,
        240,
        256,
        180,
        "GB200 NVL72: 17 TB for 72 GPUs; two share a CPU's NVLink-C2C, estimate: 0.8 of 225 GB/s",
    ),
    "B300": _system("NVLink 5", _XDR, 256, 89.6, 27.7, f"DGX B300: {_DGX_H}"),
    "GB300": _system(
        "NVLink 5",
        _XDR,
        240,
        256,
        180,
        "GB300 NVL72: 17 TB for 72 GPUs; two share a CPU's NVLink-C2C, estimate: 0.8 of 225 GB/s",
    ),
    "MI300X": _system(
        "Infinity Fabric 4",
        "RoCE 400",
        256,
        115.2,
        50,
        "estimate: 2 TB for 8 GPUs; PCIe 5.0 x16 each",
    ),
    "V100": _system(
        "NVLink 2",
        _HDR,
        64,
        19.2,
        12.35,
        "DGX-1: 512 GB for 8 GPUs; PCIe 3.0 x16, measured 12.35 alone",
    ),
    "T4": _system("PCIe 3 x16", _TCP, 48, 25.6, 12.35, "estimate: 192 GB for 4 GPUs; as V100"),
    "L4": _system("PCIe 4 x16", _TCP, 48, 51.2, 25, f"estimate: 192 GB for 4 GPUs; {_PCIE_4}"),
    "L40S": _system("PCIe 4 x16", _TCP, 96, 51.2, 25, f"estimate: 384 GB for 4 GPUs; {_PCIE_4}"),
    "A10G": _system("PCIe 4 x16", _TCP, 48, 51.2, 25, f"g5.48xlarge: 768 GB for 8 GPUs; {_PCIE_4}"),
    "RTX3090": _system("PCIe 4 x16", _TCP, 32, 51.2, 25, f"estimate: 64 GB for 2 GPUs; {_PCIE_4}"),
    "RTX4090": _system("PCIe 4 x16", _TCP, 32, 51.2, 25, f"estimate: 64 GB for 2 GPUs; {_PCIE_4}"),
    "RTX6000Ada": _system(
        "PCIe 4 x16", _TCP, 64, 76.8, 25, f"estimate: 256 GB for 4 GPUs; {_PCIE_4}"
    ),
    "RTXPRO6000": _system(
        "PCIe 5 x16", _TCP, 128, 76.8, 50, "estimate: 1 TB for 8 GPUs; 50 GB/s, PCIe 5.0 x16"
    ),
    "cpu": _system(
        "gloo loopback",
        _TCP,
        4,
        10,
        10.0,
        "estimate: the device's own memory, as fast as a copy within it",
    ),
}
"""Per device; the host's copies are those of every device of a node at once."""
