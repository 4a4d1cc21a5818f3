"""Devices, links and hosts that autopar knows by name: data, with the source of every figure.

Rates are dense peaks (no sparsity) and datasheet bandwidths. "float32" is the rate outside tensor
cores, since torch leaves TF32 off unless asked. "float64" is the tensor-core rate where there is
one, since cuBLAS uses it. A datasheet's "GB" is read as 10^9 bytes, which the memory that a driver
reports exceeds by up to 7 %: the difference is left to the CUDA context.

A new device is one entry in each of `DEVICES` and `SYSTEMS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Device, Host, Link

_LAUNCH_S = 5e-6
"""Host time to launch one CUDA kernel from C++: 3 to 8 us on current servers; an estimate."""

_NCCL = (
    "latency of a ring step and of its start, protocol LL128, in NCCL's tuning table "
    "(src/graph/tuning.cc)"
)
_START_S = 14e-6


def _per_direction(device: str, both_ways: str) -> str:
    return f"{device} datasheet: {both_ways}, half per direction; {_NCCL}"


def _lanes(rate: str) -> str:
    return f"{rate}, 16 lanes, 128b/130b; {_NCCL}"


def _adapters(rate: str) -> str:
    return f"{rate}, one adapter per GPU; {_NCCL}"


def _gpu(
    name: str, memory_gb: float, memory_tb_per_s: float, source: str, **tflops: float
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        flops_per_s=tuple((dtype, rate * 1e12) for dtype, rate in sorted(tflops.items())),
        memory_bytes=round(memory_gb * 1e9),
        memory_bytes_per_s=memory_tb_per_s * 1e12,
        launch_s=_LAUNCH_S,
        source=f"{source}; launch: estimate",
    )


def _rates(
    float64: float, float32: float, half: float, float8: float | None = None
) -> dict[str, float]:
    """TFLOP/s per dtype; `half` is for both dtypes of two bytes, `float8` for both of one byte."""
    found = {"float64": float64, "float32": float32, "bfloat16": half, "float16": half}
    return found if float8 is None else found | {"float8_e4m3fn": float8, "float8_e5m2": float8}


_AMPERE = _rates(19.5, 19.5, 312.0)
_HOPPER = _rates(67.0, 67.0, 989.4, 1978.9)
_BLACKWELL = _rates(40.0, 80.0, 2250.0, 4500.0)
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("A100", 80, 2.039, "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM", **_AMPERE),
        _gpu("A100-40G", 40, 1.555, "NVIDIA A100 Tensor Core GPU datasheet, 40GB SXM", **_AMPERE),
        _gpu("H100", 80, 3.35, "NVIDIA H100 Tensor Core GPU datasheet, SXM5", **_HOPPER),
        _gpu("H200", 141, 4.8, "NVIDIA H200 Tensor Core GPU datasheet, SXM", **_HOPPER),
        _gpu(
            "B200",
            180,
            8.0,
            "NVIDIA DGX B200 datasheet (memory), Blackwell architecture brief, HGX (rates)",
            **_BLACKWELL,
        ),
        _gpu(
            "V100",
            32,
            0.9,
            "NVIDIA V100 Tensor Core GPU datasheet, 32GB SXM2; no bfloat16 units",
            **_VOLTA,
        ),
        _gpu(
            "L4",
            24,
            0.3,
            "NVIDIA L4 Tensor Core GPU datasheet; float64: 1/64 of float32",
            **_rates(0.473, 30.3, 121.0, 242.5),
        ),
        _gpu(
            "RTX3090",
            24,
            0.936,
            "NVIDIA Ampere GA102 whitepaper, float32 accumulation; float64: 1/64 of float32",
            **_rates(0.556, 35.6, 71.0),
        ),
        _gpu(
            "RTX4090",
            24,
            1.008,
            "NVIDIA Ada GPU whitepaper, float32 accumulation; float64: 1/64 of float32",
            **_rates(1.29, 82.6, 165.2, 330.3),
        ),
        Device(
            name="cpu",
            kind="cpu",
            flops_per_s=(
                ("bfloat16", 1.2e9),
                ("float16", 1.2e9),
                ("float32", 50e9),
                ("float64", 25e9),
            ),
            memory_bytes=4 * 10**9,
            memory_bytes_per_s=10e9,
            launch_s=2e-6,
            source="estimate: one server core with AVX2 and no bfloat16 units; its share of memory",
        ),
    )
}

ALIASES: dict[str, str] = {"A100-80G": "A100", "V100-32G": "V100", "H100-80G": "H100"}
"""Other names of devices."""

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("NVLink 2", 150e9, 1.9e-6, _START_S, _per_direction("V100", "300 GB/s")),
        Link("NVLink 3", 300e9, 1.9e-6, _START_S, _per_direction("A100", "600 GB/s")),
        Link("NVLink 4", 450e9, 1.9e-6, _START_S, _per_direction("H100", "900 GB/s")),
        Link("NVLink 5", 900e9, 1.9e-6, _START_S, _per_direction("DGX B200", "1.8 TB/s")),
        Link("PCIe 4 x16", 31.5e9, 2.5e-6, _START_S, _lanes("PCIe 4.0: 16 GT/s")),
        Link("PCIe 5 x16", 63.0e9, 2.5e-6, _START_S, _lanes("PCIe 5.0: 32 GT/s")),
        Link("InfiniBand HDR 200", 25e9, 4e-6, _START_S, _adapters("HDR: 200 Gb/s")),
        Link("InfiniBand NDR 400", 50e9, 4e-6, _START_S, _adapters("NDR: 400 Gb/s")),
        Link(
            "Ethernet 100G",
            12.5e9,
            25e-6,
            _START_S,
            "100GBASE: 100 Gb/s per node; latency: estimate, TCP; start: as the other links",
        ),
        Link(
            "gloo loopback",
            0.8e9,
            0.5e-3,
            1.5e-3,
            "measured: gloo over TCP within one machine, four processes on two cores that they "
            "share; all-reduce of 16 B in 3.3 ms, of 1 MiB in 7.1 ms, of 4 MiB in 11 ms, in pairs "
            "of processes 2.8, 3.3 and 8.5 ms",
        ),
    )
}

SHARED_LINKS = frozenset({"Ethernet 100G"})
"""Links of which a node has one: its devices share the bandwidth."""


@dataclass(frozen=True, slots=True)
class System:
    """What usually stands around a device: links (by name) in and between nodes, and the host."""

    node_link: str
    network_link: str
    host: Host


def _system(node: str, network: str, memory_gb: float, gb_per_s: float, source: str) -> System:
    host = Host(round(memory_gb * 1e9), gb_per_s * 1e9, 10e-6, f"{source}; latency: estimate")
    return System(node, network, host)


_HDR, _NDR, _TCP = "InfiniBand HDR 200", "InfiniBand NDR 400", "Ethernet 100G"

SYSTEMS: dict[str, System] = {
    "A100": _system("NVLink 3", _HDR, 256, 31.5, "DGX A100 640GB: 2 TB for 8 GPUs; PCIe 4.0 x16"),
    "A100-40G": _system(
        "NVLink 3", _HDR, 128, 31.5, "DGX A100 320GB: 1 TB for 8 GPUs; PCIe 4.0 x16"
    ),
    "H100": _system("NVLink 4", _NDR, 256, 63.0, "DGX H100: 2 TB for 8 GPUs; PCIe 5.0 x16"),
    "H200": _system("NVLink 4", _NDR, 256, 63.0, "DGX H200: 2 TB for 8 GPUs; PCIe 5.0 x16"),
    "B200": _system("NVLink 5", _NDR, 256, 63.0, "DGX B200: 2 TB for 8 GPUs; PCIe 5.0 x16"),
    "V100": _system("NVLink 2", _HDR, 64, 15.75, "DGX-1: 512 GB for 8 GPUs; PCIe 3.0 x16"),
    "L4": _system("PCIe 4 x16", _TCP, 48, 31.5, "estimate: 192 GB for 4 GPUs; PCIe 4.0 x16"),
    "RTX3090": _system("PCIe 4 x16", _TCP, 32, 31.5, "estimate: 64 GB for 2 GPUs; PCIe 4.0 x16"),
    "RTX4090": _system("PCIe 4 x16", _TCP, 32, 31.5, "estimate: 64 GB for 2 GPUs; PCIe 4.0 x16"),
    "cpu": _system(
        "gloo loopback",
        _TCP,
        4,
        10.0,
        "estimate: the device's own memory, as fast as a copy within it",
    ),
}
