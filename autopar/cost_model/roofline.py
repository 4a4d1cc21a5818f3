"""Seconds of one kernel on one device, from its FLOPs and the bytes it moves.

A roofline (Williams, Waterman and Patterson, 2009) with two documented departures:

    seconds = launch + max(compute, memory)
    memory  = bytes / (MEMORY_CEILING * bandwidth)
    compute = flops / (peak * efficiency)
    efficiency = COMPUTE_CEILING * intensity / (intensity + KNEE * peak / bandwidth)

with intensity = flops / bytes. The efficiency rises with arithmetic intensity towards its ceiling,
so that a kernel near the ridge costs more than either bound; `launch` dominates small kernels.
Written out, compute = (flops / peak + KNEE * bytes / bandwidth) / COMPUTE_CEILING: no division by
zero, and the result never falls as flops or bytes grow.
"""

from __future__ import annotations

from math import isfinite

from autopar.ir.mesh import Device

COMPUTE_CEILING = 0.75
"""Part of the datasheet's FLOP/s that a large matmul reaches; an estimate for devices without a
profile (large bfloat16 matmuls reach about 0.65 to 0.85 on A100 and H100)."""

MEMORY_CEILING = 0.85
"""Part of the datasheet's memory bandwidth that a large copy reaches; an estimate."""

KNEE = 0.5
"""The intensity, as a part of the ridge point peak / bandwidth, at which a matmul reaches half its
ceiling; an estimate."""


def op_s(flops: float, bytes_moved: float, dtype: str, device: Device) -> float:
    """Seconds of one kernel that does `flops` floating-point operations in `dtype` ("bfloat16") and
    reads and writes `bytes_moved` bytes of `device` memory.

    A kernel costs its launch even when it does nothing: whoever knows that an op launches none (a
    view) does not ask. ValueError if a figure is negative, infinite or not a number.
    """
    if not (isfinite(flops) and isfinite(bytes_moved) and flops >= 0 and bytes_moved >= 0):
        raise ValueError(f"a kernel cannot do {flops} FLOPs on {bytes_moved} bytes")
    move_s = bytes_moved / device.memory_bytes_per_s
    memory_s = move_s / MEMORY_CEILING
    if not flops:
        return device.launch_s + memory_s
    compute_s = (flops / device.peak(dtype) + KNEE * move_s) / COMPUTE_CEILING
    return device.launch_s + max(compute_s, memory_s)
