"""Devices that autopar knows by name: data, with the source of every figure.

Rates are dense peaks (no sparsity) and datasheet bandwidths. "float32" is the rate outside tensor
cores, since torch leaves TF32 off unless asked. "float64" is the tensor-core rate where there is
one, since cuBLAS uses it. A datasheet's "GB" is read as 10^9 bytes, which the memory that a driver
reports exceeds by up to 7 %: the difference is left to the CUDA context.
"""

from __future__ import annotations

from autopar.ir.mesh import Device

_LAUNCH_S = 5e-6
"""Host time to launch one CUDA kernel from C++: 3 to 8 us on current servers; an estimate."""


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
_GRACE_BLACKWELL = _rates(40.0, 80.0, 2500.0, 5000.0)
_BLACKWELL_ULTRA = _rates(1.2, 75.0, 2250.0, 4500.0)
_GRACE_BLACKWELL_ULTRA = _rates(1.3, 80.0, 2500.0, 5000.0)
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_TURING = {"float64": 0.253, "float32": 8.1, "float16": 65.0}
_SLOW_64 = "float64: 1/64 of float32"

_GPUS = (
    _gpu("A100", 80, 2.039, "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM", **_AMPERE),
    _gpu("A100-40G", 40, 1.555, "NVIDIA A100 Tensor Core GPU datasheet, 40GB SXM", **_AMPERE),
    _gpu("H100", 80, 3.35, "NVIDIA H100 Tensor Core GPU datasheet, SXM5", **_HOPPER),
    _gpu(
        "H100-PCIe",
        80,
        2.0,
        "NVIDIA H100 Tensor Core GPU datasheet, PCIe",
        **_rates(51.0, 51.0, 756.0, 1513.0),
    ),
    _gpu("H200", 141, 4.8, "NVIDIA H200 Tensor Core GPU datasheet, SXM", **_HOPPER),
    _gpu("GH200", 96, 4.0, "NVIDIA GH200 Grace Hopper Superchip datasheet, HBM3", **_HOPPER),
    _gpu(
        "B200",
        180,
        8.0,
        "NVIDIA DGX B200 datasheet (memory), Blackwell architecture brief, HGX (rates)",
        **_BLACKWELL,
    ),
    _gpu("GB200", 186, 8.0, "NVIDIA GB200 NVL72 datasheet, 1/72 of it", **_GRACE_BLACKWELL),
    _gpu("B300", 268, 8.0, "NVIDIA HGX B300 datasheet, 1/8 of it", **_BLACKWELL_ULTRA),
    _gpu("GB300", 278, 8.0, "NVIDIA GB300 NVL72 datasheet, 1/72 of it", **_GRACE_BLACKWELL_ULTRA),
    _gpu(
        "MI300X", 192, 5.3, "AMD Instinct MI300X datasheet", **_rates(163.4, 163.4, 1307.4, 2614.9)
    ),
    _gpu(
        "V100",
        32,
        0.9,
        "NVIDIA V100 Tensor Core GPU datasheet, 32GB SXM2; no bfloat16 units",
        **_VOLTA,
    ),
    _gpu(
        "T4",
        16,
        0.32,
        "NVIDIA T4 Tensor Core GPU datasheet; no bfloat16 units; float64: 1/32 of float32",
        **_TURING,
    ),
    _gpu(
        "L4",
        24,
        0.3,
        f"NVIDIA L4 Tensor Core GPU datasheet; {_SLOW_64}",
        **_rates(0.473, 30.3, 121.0, 242.5),
    ),
    _gpu(
        "L40S",
        48,
        0.864,
        f"NVIDIA L40S GPU datasheet; {_SLOW_64}",
        **_rates(1.43, 91.6, 362.1, 733.0),
    ),
    _gpu(
        "A10G",
        24,
        0.6,
        f"NVIDIA A10G figures of AWS EC2 G5; {_SLOW_64}",
        **_rates(0.547, 35.0, 70.0),
    ),
    _gpu(
        "RTX3090",
        24,
        0.936,
        f"NVIDIA Ampere GA102 whitepaper, float32 accumulation; {_SLOW_64}",
        **_rates(0.556, 35.6, 71.0),
    ),
    _gpu(
        "RTX4090",
        24,
        1.008,
        f"NVIDIA Ada GPU whitepaper, float32 accumulation; {_SLOW_64}",
        **_rates(1.29, 82.6, 165.2, 330.3),
    ),
    _gpu(
        "RTX6000Ada",
        48,
        0.96,
        f"NVIDIA RTX 6000 Ada Generation datasheet; {_SLOW_64}",
        **_rates(1.42, 91.1, 364.2, 728.5),
    ),
    _gpu(
        "RTXPRO6000",
        96,
        1.597,
        f"NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet; {_SLOW_64}",
        **_rates(1.88, 120.0, 503.8, 1007.6),
    ),
)

_CPU = Device(
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
)

DEVICES: dict[str, Device] = {device.name: device for device in (*_GPUS, _CPU)}

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
