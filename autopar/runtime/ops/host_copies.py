"""Copies of a device's tensors in the memory of its host: `autopar::offload` begins one,
`autopar::reload` begins to bring it back, and `autopar::arrived` is behind the end of either, for
what the device does; `autopar::landed` for what the host does.

On a GPU both run on streams of their own beside the one that computes. A copy starts when that
stream comes to where it was begun, as it must: what it reads was made before, and the memory it is
brought into was used before. Both tensors are held here until `arrived`, or the copy is over. The
host's memory is pinned, and is torch's to reuse once the last tensor in it is gone: a step takes
what the step before it took. Elsewhere the host's memory is the device's, and copies are made at
once.
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

# Where a thread runs that has memory of the host pinned for a device.
#
# On a machine of several NUMA nodes pages are those of the node that the thread runs on. Copies to
# and from another node's go over the link between sockets, which is slower and shared.

SYSTEM = Path("/sys")
"""Where Linux says which processors and devices are on which node."""


@contextmanager
def near_device(device: torch.device) -> Generator[None, None, None]:
    """Inside, this thread runs on processors of the node that a CUDA `device` is on, as far as it
    may; where nothing is known of nodes, where it did."""
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
"""The end of each copy that was begun on a GPU, and both tensors, by where its result lies."""


@operator("offload(Tensor x) -> Tensor")
def offload(x: Tensor) -> Tensor:
    """A copy of `x`, laid out as it is, in the host's memory; what is in it is not known before
    `arrived`."""
    if not x.is_cuda:
        return x.clone()
    return _begun(room_for(x), x, x.device, "offload")


@offload.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu" if x.is_cuda else x.device)


@operator("reload(Tensor x, Device device) -> Tensor")
def reload(x: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of what `offload` left; what is in it is not known before `arrived`."""
    if device.type != "cuda":
        return x.clone()
    return _begun(torch.empty_like(x, device=device), x, device, "reload")


@reload.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


@operator("arrived(Tensor(a!) copy) -> ()")
def arrived(copy: Tensor) -> None:
    """What computes goes on when all of `copy` is there."""
    begun = _under_way.pop(copy.data_ptr(), None)
    if begun is not None:
        event, *both = begun
        device = next(tensor.device for tensor in both if tensor.is_cuda)
        torch.cuda.current_stream(device).wait_event(event)


@operator("landed(Tensor(a!) copy) -> ()")
def landed(copy: Tensor) -> None:
    """The host goes on when all of `copy` is there, which is in its memory."""
    begun = _under_way.pop(copy.data_ptr(), None)
    if begun is not None:
        begun[0].synchronize()


@arrived.register_fake
@landed.register_fake
def _(copy: Tensor) -> None:
    """Nothing is made."""


def wait_for_loads(device: torch.device) -> None:
    """The host goes on when all that was being copied to `device` is there, and may change what it
    was copied from."""
    if device.type == "cuda":
        _stream(device, "reload").synchronize()


def copy_on_host(x: Tensor) -> Tensor:
    """A copy of `x` in the host's memory, from which the device can be sent to; `x` itself where
    that is the device's."""
    return room_for(x).copy_(x) if x.is_cuda else x


def room_for(x: Tensor) -> Tensor:
    """Pinned memory of the host for a copy of a GPU's tensor, on the GPU's NUMA node."""
    with near_device(x.device):
        return torch.empty_like(x, device="cpu", pin_memory=True)


def _begun(copy: Tensor, x: Tensor, device: torch.device, direction: str) -> Tensor:
    """`copy`, into which `x` is on its way."""
    stream = _stream(device, direction)
    # Of a step that failed, nothing ever says that it arrived.
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
