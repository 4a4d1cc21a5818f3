"""How much the buckets of a mesh axis hold: enough that their start is a small part of them.

An all-gather takes as long to start as its link takes for 4 MB among 8 ranks on NVLink 4, for
850 MB among 512 over NDR, where a ring has 511 steps, and for 0.1 MB over Ethernet of 1 Gb/s. A
larger bucket delays the first message, and more is held.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.collectives import collective_s
from autopar.ir.mesh import BUCKET_BYTES, Axis, Device, Mesh

START_PART = 0.2
"""What part of a full bucket's time its start is at most. On 512 H100 in nodes of 8, FSDP of an 8B
Llama is played in 1,120 ms with buckets of 25 MiB, in 406 with 400 and in 276 with 1,000."""

SMALL_START_PART = 0.05
"""The same of a bucket that is smaller than `mesh.BUCKET_BYTES`: with n starts in all that is sent,
and 1/n of it sent last, behind which nothing hides, 1 + 1/20 + 1/n of its time is little for any n
from ten on."""

LEAST_BYTES = BUCKET_BYTES // 16
"""What a bucket holds at least."""

MEMORY_PART = 1 / 64
"""What part of a device's memory a bucket takes at most."""


def with_buckets(mesh: Mesh, device: Device) -> Mesh:
    """`mesh` with what its buckets hold: `mesh.BUCKET_BYTES`; on links that are slow and quick to
    start, half of it and so on, while the start is at most `SMALL_START_PART`; where starts take
    long, twice as much and so on, until it is at most `START_PART`, or the most that memory allows.
    """
    return Mesh(tuple(replace(axis, bucket_bytes=_bucket_bytes(axis, device)) for axis in mesh))


def _bucket_bytes(axis: Axis, device: Device) -> int:
    found = BUCKET_BYTES
    while found > LEAST_BYTES and _start_part(axis, found // 2) <= SMALL_START_PART:
        found //= 2
    while _start_part(axis, found) > START_PART:
        if 2 * found > MEMORY_PART * device.memory_bytes:
            break
        found *= 2
    return found


def _start_part(axis: Axis, bucket_bytes: int) -> float:
    """What part of a bucket's all-gather is its start; none where nothing is sent."""
    whole_s = collective_s("all_gather", bucket_bytes // axis.size, bucket_bytes, axis)
    return collective_s("all_gather", 0, 0, axis) / whole_s if whole_s else 0.0
