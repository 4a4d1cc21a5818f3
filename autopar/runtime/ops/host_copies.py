"""Copies of a device's tensors in the memory of its host. `autopar::offload` begins one, and
`autopar::reload` begins to copy it back. The device waits for the end of either at
`autopar::arrived`, the host at `autopar::landed`.

On a GPU both run on streams of their own beside the one that computes. A copy waits until the
compute stream has reached the op that begins it: earlier ops write its source, and use the memory
of its target. Both tensors are held here until `arrived`, or until the copy is over. The host's
memory is pinned, and torch reuses it once its last tensor is freed: a step takes the memory of the
step before it. On a CPU, host and device share memory, and copies are made at once.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.ops.operators import operator

# The NUMA node of a thread that allocates pinned host memory for a device.
#
# On a machine with several NUMA nodes, pages are on the node that the thread runs on. Copies to and
# from another node go over the link between sockets, which is slower and shared.

SYSTEM = Path("/sys")
"""Where Linux lists the processors and devices of each node."""


@contextmanager
def near_device(device: torch.device) -> Generator[None, None, None]:
    """Inside, this thread runs on processors of the node of a CUDA `device`, as far as its affinity
    allows. Without information on nodes, nothing changes."""
    before = os.sched_getaffinity(0) if device.type == "cuda" else frozenset[int]()
    near = before & cpus_near(device) if before else before
    if not near or near == before:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@cache
def cpus_near(device: torch.device) -> frozenset[int]:
    """The processors on the node of a CUDA `device`; none if that is not known."""
    gpu = torch.cuda.get_device_properties(device)
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
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


_streams: dict[tuple[int, str], torch.cuda.Stream] = {}
_under_way: dict[int, tuple[Any, Tensor, Tensor]] = {}
"""The end event of each copy under way on a GPU, and both tensors, by the address of its result."""


@operator("offload(Tensor x) -> Tensor")
def offload(x: Tensor) -> Tensor:
    """A copy of `x`, with its layout, in the host's memory; its values are not valid before
    `arrived`."""
    if not x.is_cuda:
        return x.clone()
    return _begun(room_for(x), x, x.device, "offload")


@offload.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu" if x.is_cuda else x.device)


@operator("reload(Tensor x, Device device) -> Tensor")
def reload(x: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of the result of `offload`; its values are not valid before `arrived`."""
    if device.type != "cuda":
        return x.clone()
    return _begun(torch.empty_like(x, device=device), x, device, "reload")


@reload.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


@operator("arrived(Tensor(a!) copy) -> ()")
def arrived(copy: Tensor) -> None:
    """The compute stream waits until `copy` is complete."""
    begun = _under_way.pop(copy.data_ptr(), None)
    if begun is not None:
        event, *both = begun
        device = next(tensor.device for tensor in both if tensor.is_cuda)
        torch.cuda.current_stream(device).wait_event(event)


@operator("landed(Tensor(a!) copy) -> ()")
def landed(copy: Tensor) -> None:
    """The host waits until `copy`, in its memory, is complete."""
    begun = _under_way.pop(copy.data_ptr(), None)
    if begun is not None:
        begun[0].synchronize()


@arrived.register_fake
@landed.register_fake
def _(copy: Tensor) -> None:
    """Nothing is made."""


def wait_for_loads(device: torch.device) -> None:
    """The host waits for all copies to `device`, and may change their sources afterwards."""
    if device.type == "cuda":
        _stream(device, "reload").synchronize()


def copy_on_host(x: Tensor) -> Tensor:
    """A copy of `x` in pinned host memory; `x` itself if it is on the CPU."""
    return room_for(x).copy_(x) if x.is_cuda else x


def room_for(x: Tensor) -> Tensor:
    """Pinned memory of the host for a copy of a GPU's tensor, on the GPU's NUMA node."""
    with near_device(x.device):
        return torch.empty_like(x, device="cpu", pin_memory=True)


def _begun(copy: Tensor, x: Tensor, device: torch.device, direction: str) -> Tensor:
    """Begin to copy `x` into `copy`, which is returned."""
    stream = _stream(device, direction)
    # A step that failed never runs `arrived` for its copies.
    for place in [place for place, (event, *_) in _under_way.items() if event.query()]:
        del _under_way[place]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(x, non_blocking=True)
        _under_way[copy.data_ptr()] = stream.record_event(), copy, x
    return copy


def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    key = torch.cuda.current_device() if device.index is None else device.index, direction
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


OFFLOAD = torch.ops.autopar.offload.default
RELOAD = torch.ops.autopar.reload.default
ARRIVED = torch.ops.autopar.arrived.default
LANDED = torch.ops.autopar.landed.default
"""As they stand in graphs."""
