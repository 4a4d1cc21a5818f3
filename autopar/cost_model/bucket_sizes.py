"""How much the buckets of a mesh axis hold: enough that their start is a small part of them.

An all-gather takes as long to start as its link takes for 4 MB among 8 ranks on NVLink 4, and for
850 MB among 512 over NDR, where a ring has 511 steps. A larger bucket delays the first message, and
more is held.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model.collectives import collective_s
from autopar.ir.mesh import BUCKET_BYTES, Axis, Device, Mesh

START_PART = 0.2
"""What part of a full bucket's time its start is at most. On 512 H100 in nodes of 8, FSDP of an 8B
Llama is played in 1,120 ms with buckets of 25 MiB, in 406 with 400 and in 276 with 1,000."""

MEMORY_PART = 1 / 64
"""What part of a device's memory a bucket takes at most."""


def with_buckets(mesh: Mesh, device: Device) -> Mesh:
    """`mesh` with what its buckets hold: of `mesh.BUCKET_BYTES`, twice as much and so on, the least
    whose start is at most `START_PART`, or the most that memory allows."""
    return Mesh(tuple(replace(axis, bucket_bytes=_bucket_bytes(axis, device)) for axis in mesh))


def _bucket_bytes(axis: Axis, device: Device) -> int:
    start_s = collective_s("all_gather", 0, 0, axis)
    found = BUCKET_BYTES
    while 2 * found <= MEMORY_PART * device.memory_bytes:
        if start_s <= START_PART * collective_s("all_gather", found // axis.size, found, axis):
            break
        found *= 2
    return found
