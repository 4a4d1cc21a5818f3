"""Devices that autopar knows by name: data, with the source of every figure.

Rates are dense peaks (no sparsity) and datasheet bandwidths. "float32" is the rate outside tensor
cores, since torch leaves TF32 off by default. "float64" is the tensor-core rate where there is one,
since cuBLAS uses it. A datasheet's "GB" is read as 10^9 bytes. The memory that a driver reports is
up to 7 % more; the difference is left to the CUDA context. What kernels reach of these rates is in
`kernels.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.cluster.kernels import (
    ADA_KERNELS,
    AMPERE_KERNELS,
    B300_KERNELS,
    BLACKWELL_KERNELS,
    CDNA_KERNELS,
    GB200_KERNELS,
    GB300_KERNELS,
    GRAPHICS_BLACKWELL_KERNELS,
    H200_KERNELS,
    HOPPER_KERNELS,
    LAUNCH_S,
    VOLTA_KERNELS,
)
from autopar.ir.mesh import Device, Kernels

GRANULE_BYTES = 512
"""torch's allocator rounds each request up to multiples of it (CUDACachingAllocator.cpp,
kMinBlockSize)."""

_A100_FIT = "products fitted within 5 and 18 %, attention 4 and 17 % above 200 us"
_H100_FIT = (
    "products fitted within 6 and 14 %, and 0.9 of that sustained; attention: 287 to 363 TFLOP/s "
    "forward and 282 to 308 backward (pytorch/benchmark, flash-attention)"
)
_B200_FIT = (
    "products fitted within {} %; attention: 248 to 415 TFLOP/s forward on causal B200, 0.87 of it "
    "backward"
)


def _gpu(
    name: str,
    memory_gb: float,
    memory_tb_per_s: float,
    source: str,
    kernels: Kernels,
    fit: str,
    tflops: dict[str, float],
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        flops_per_s=tuple((dtype, rate * 1e12) for dtype, rate in sorted(tflops.items())),
        memory_bytes=round(memory_gb * 1e9),
        memory_bytes_per_s=memory_tb_per_s * 1e12,
        launch_s=LAUNCH_S,
        source=f"{source}; launch: measured on hosts of other GPUs; kernels: {fit}",
        kernels=kernels,
        granule_bytes=GRANULE_BYTES,
    )


def _of(generation: str, measured: str) -> str:
    return f"not measured, {generation}'s, which are those of {measured}"


def _rates(
    float64: float, float32: float, half: float, float8: float | None = None
) -> dict[str, float]:
    """TFLOP/s per dtype; `half` is for both dtypes of two bytes, `float8` for both of one byte."""
    rates = {"float64": float64, "float32": float32, "bfloat16": half, "float16": half}
    return rates if float8 is None else rates | {"float8_e4m3fn": float8, "float8_e5m2": float8}


_A100_RATES = _rates(19.5, 19.5, 312.0)
_H100_RATES = _rates(67.0, 67.0, 989.4, 1978.9)
_SLOW_64 = "float64: 1/64 of float32"

_DATACENTER = (
    _gpu(
        "A100",
        80,
        2.039,
        "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM",
        AMPERE_KERNELS,
        _A100_FIT,
        _A100_RATES,
    ),
    _gpu(
        "A100-40G",
        40,
        1.555,
        "NVIDIA A100 Tensor Core GPU datasheet, 40GB SXM",
        AMPERE_KERNELS,
        f"those of the 80GB card: {_A100_FIT}",
        _A100_RATES,
    ),
    _gpu(
        "H100",
        80,
        3.35,
        "NVIDIA H100 Tensor Core GPU datasheet, SXM5",
        HOPPER_KERNELS,
        _H100_FIT,
        _H100_RATES,
    ),
    _gpu(
        "H100-PCIe",
        80,
        2.0,
        "NVIDIA H100 Tensor Core GPU datasheet, PCIe",
        replace(HOPPER_KERNELS, processors=114, pointwise=0.85),
        f"a copy at 0.85 of the bandwidth measured; else {_of('Hopper', 'H100 SXM')}",
        _rates(51.0, 51.0, 756.0, 1513.0),
    ),
    _gpu(
        "H200",
        141,
        4.8,
        "NVIDIA H200 Tensor Core GPU datasheet, SXM",
        H200_KERNELS,
        _H100_FIT,
        _H100_RATES,
    ),
    _gpu(
        "GH200",
        96,
        4.0,
        "NVIDIA GH200 Grace Hopper Superchip datasheet, HBM3",
        H200_KERNELS,
        _of("Hopper", "H200"),
        _H100_RATES,
    ),
    _gpu(
        "B200",
        180,
        8.0,
        "NVIDIA DGX B200 datasheet (memory), Blackwell architecture brief, HGX (rates)",
        BLACKWELL_KERNELS,
        _B200_FIT.format("6 and 16"),
        _rates(40.0, 80.0, 2250.0, 4500.0),
    ),
    _gpu(
        "GB200",
        186,
        8.0,
        "NVIDIA GB200 NVL72 datasheet, 1/72 of it",
        GB200_KERNELS,
        _B200_FIT.format("6 and 19"),
        _rates(40.0, 80.0, 2500.0, 5000.0),
    ),
    _gpu(
        "B300",
        268,
        8.0,
        "NVIDIA HGX B300 datasheet, 1/8 of it",
        B300_KERNELS,
        _B200_FIT.format("6 and 19"),
        _rates(1.2, 75.0, 2250.0, 4500.0),
    ),
    _gpu(
        "GB300",
        278,
        8.0,
        "NVIDIA GB300 NVL72 datasheet, 1/72 of it",
        GB300_KERNELS,
        _B200_FIT.format("5 and 15"),
        _rates(1.3, 80.0, 2500.0, 5000.0),
    ),
    _gpu(
        "MI300X",
        192,
        5.3,
        "AMD Instinct MI300X datasheet",
        CDNA_KERNELS,
        "large products at 668 TFLOP/s measured (stas00, ml-engineering), the rest not: A100's, "
        "attention an estimate",
        _rates(163.4, 163.4, 1307.4, 2614.9),
    ),
    _gpu(
        "V100",
        32,
        0.9,
        "NVIDIA V100 Tensor Core GPU datasheet, 32GB SXM2; no bfloat16 units",
        VOLTA_KERNELS,
        "streams measured (gpu-benches); products not, A100's; attention without a fused kernel: "
        "0.15 measured on RTX A5000",
        {"float64": 7.8, "float32": 15.7, "float16": 125.0},
    ),
)

_WORKSTATION = (
    _gpu(
        "T4",
        16,
        0.32,
        "NVIDIA T4 Tensor Core GPU datasheet; no bfloat16 units; float64: 1/32 of float32",
        replace(VOLTA_KERNELS, processors=40, pointwise=0.74, reduction=0.6),
        "streams measured; products and attention as V100",
        {"float64": 0.253, "float32": 8.1, "float16": 65.0},
    ),
    _gpu(
        "L4",
        24,
        0.3,
        f"NVIDIA L4 Tensor Core GPU datasheet; {_SLOW_64}",
        replace(ADA_KERNELS, processors=58, pointwise=0.78, reduction=0.78),
        f"streams measured; else {_of('Ada', 'L40S')}",
        _rates(0.473, 30.3, 121.0, 242.5),
    ),
    _gpu(
        "L40S",
        48,
        0.864,
        f"NVIDIA L40S GPU datasheet; {_SLOW_64}",
        ADA_KERNELS,
        "products fitted within 10 and 24 %, attention 9 and 37 % above 200 us",
        _rates(1.43, 91.6, 362.1, 733.0),
    ),
    _gpu(
        "A10G",
        24,
        0.6,
        f"NVIDIA A10G figures of AWS EC2 G5; {_SLOW_64}",
        replace(AMPERE_KERNELS, processors=80, pointwise=0.9),
        _of("Ampere", "A100"),
        _rates(0.547, 35.0, 70.0),
    ),
    _gpu(
        "RTX3090",
        24,
        0.936,
        f"NVIDIA Ampere GA102 whitepaper, float32 accumulation; {_SLOW_64}",
        replace(AMPERE_KERNELS, processors=82, pointwise=0.9),
        _of("Ampere", "A100"),
        _rates(0.556, 35.6, 71.0),
    ),
    _gpu(
        "RTX4090",
        24,
        1.008,
        f"NVIDIA Ada GPU whitepaper, float32 accumulation; {_SLOW_64}",
        replace(ADA_KERNELS, processors=128),
        _of("Ada", "L40S"),
        _rates(1.29, 82.6, 165.2, 330.3),
    ),
    _gpu(
        "RTX6000Ada",
        48,
        0.96,
        f"NVIDIA RTX 6000 Ada Generation datasheet; {_SLOW_64}",
        ADA_KERNELS,
        _of("Ada", "L40S"),
        _rates(1.42, 91.1, 364.2, 728.5),
    ),
    _gpu(
        "RTXPRO6000",
        96,
        1.597,
        f"NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet; {_SLOW_64}",
        GRAPHICS_BLACKWELL_KERNELS,
        "products fitted within 5 and 20 %, attention 7 and 36 % above 200 us",
        _rates(1.88, 120.0, 503.8, 1007.6),
    ),
)

_CPU = Device(
    name="cpu",
    kind="cpu",
    flops_per_s=(
        ("bfloat16", 1.2e9),
        ("float16", 1.2e9),
        ("float32", 96e9),
        ("float64", 48e9),
    ),
    memory_bytes=4 * 10**9,
    memory_bytes_per_s=10e9,
    launch_s=2e-6,
    source="estimate: one server core with two AVX2 units at 3 GHz and no bfloat16 units; its "
    "share of memory",
    kernels=Kernels(
        matmul=0.75,
        matmul_memory=0.85,
        wave=0,
        depth=0,
        processors=1,
        attention=0.4,
        attention_narrow=1,
        attention_backward=1,
        attention_tokens=0,
        pointwise=0.85,
        reduction=0.85,
        reduction_backward=0.85,
    ),
)

DEVICES: dict[str, Device] = {device.name: device for device in (*_DATACENTER, *_WORKSTATION, _CPU)}

ALIASES: dict[str, str] = {
    "A100-80G": "A100",
    "A100-80GB": "A100",
    "A100-40GB": "A100-40G",
    "A100-SXM": "A100",
    "H100-80G": "H100",
    "H100-SXM": "H100",
    "H200-SXM": "H200",
    "B200-SXM": "B200",
    "B300-SXM": "B300",
    "V100-32G": "V100",
    "RTX 6000": "RTX6000Ada",
    "RTX PRO 6000 Blackwell": "RTXPRO6000",
}
"""Other names of devices."""


def preset_of(name: str, memory_bytes: int | None = None) -> str | None:
    """The preset of a device, by its driver's name for it and its memory, which may be part of that
    name: H100 for "NVIDIA H100 80GB HBM3". Of several matching presets the one with the longest
    name is taken, such as H100-PCIe. A size in a preset's name is that of the memory."""
    words = re.split(r"[\s-]+", name.upper())
    spoken = {"".join(words[i:j]) for j in range(len(words) + 1) for i in range(max(0, j - 3), j)}
    sizes_gb = [int(match[1]) for word in words if (match := re.fullmatch(r"(\d+)GB", word))]
    size = memory_bytes or (sizes_gb[0] * 10**9 if sizes_gb else None)

    def fits(preset: str) -> bool:
        has_size = size is None or abs(DEVICES[preset].memory_bytes - size) < 0.15 * size
        parts = (part for part in preset.upper().split("-") if not re.fullmatch(r"\d+G", part))
        return has_size and spoken.issuperset(parts)

    return min(filter(fits, DEVICES), key=lambda preset: (-len(preset), preset), default=None)
