"""Where a thread runs that has memory of the host pinned for a device.

On a machine of several NUMA nodes pages are those of the node that the thread runs on. Copies to
and from another node's go over the link between sockets, which is slower and shared.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

SYSTEM = Path("/sys")
"""Where Linux says which processors and devices are on which node."""


@contextmanager
def near_device(device: torch.device) -> Generator[None, None, None]:
    """Inside, this thread runs on processors of the node that a CUDA `device` is on, as far as it
    may; where nothing is known of nodes, where it did."""
    before = os.sched_getaffinity(0) if device.type == "cuda" else frozenset[int]()
    wanted = before & cpus_near(device) if before else before
    if not wanted or wanted == before:
        yield
        return
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@cache
def cpus_near(device: torch.device) -> frozenset[int]:
    """The processors on the node of a CUDA `device`; none if that is not known."""
    found = torch.cuda.get_device_properties(device)
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        node = int((SYSTEM / "bus/pci/devices" / place / "numa_node").read_text())
        # -1: the machine has one node.
        cpus = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cpu for part in cpus.strip().split(",") if part for cpu in _range(part))


def _range(text: str) -> range:
    """`0-3` or `7`, as the kernel lists processors."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
