"""What copies of tensors in the memory of the host take."""

from __future__ import annotations

from typing import Literal

from autopar.cost_model.event_prices import PricedStep
from autopar.cost_model.moves import to_ns
from autopar.ir.graph import Ref
from autopar.ir.mesh import HOST_LINKS, Cluster, Host
from autopar.ir.sharding import Sharding
from autopar.plans.host_copies import COPIES, copy_key
from autopar.plans.layout import Layout
from autopar.plans.request import PlanRequest
from autopar.plans.streaming import copies_of

_THOUSAND = 1000

_MAX_AXES = 2
_FAST = 1 / 20
"""Which part of the bandwidth of the device's memory a link to the host has where it is open on two
mesh axes what is offloaded. Problems of two have many more columns, for which the dense rows of two
more resources are slow. Llama-8B on 8x8 within 18 GiB takes 40 CPU seconds of planning instead of
20 on GH200, for a step that is 3 % shorter; on H100 54 instead of 17, for 0.9 %."""


def is_open(request: PlanRequest) -> bool:
    """Whether it may be decided what is in the memory of the host: that of a CPU is the device's.
    Where residency "auto" is asked for, links of any rate will do on two axes."""
    device, host = request.cluster.device, request.cluster.host
    is_fast = host.bytes_per_s >= _FAST * device.memory_bytes_per_s
    is_asked = request.options.residency == "auto"
    axes = len(request.mesh)
    has_own = request.cluster.has_host_memory
    return has_own and (axes <= 1 or (axes <= _MAX_AXES and (is_fast or is_asked)))


def copy_ns(num_bytes: int, host: Host) -> int:
    """How long the link to the host is busy with a tensor, either way: `Host.bytes_per_s` is what
    it has where all devices of a node copy at once."""
    return to_ns(host.latency_s + num_bytes / host.bytes_per_s)


def copies(layout: Layout, cluster: Cluster) -> dict[str, tuple[PricedStep]]:
    """The copies of what is offloaded, and of parameters on the host, by their key."""
    found: dict[str, tuple[PricedStep]] = {}
    launch_ns = to_ns(cluster.device.host_launch_s)

    def priced(kind: Literal["offload", "reload"], root: Ref, state: Sharding) -> tuple[PricedStep]:
        num_bytes = layout.held_bytes(root, state)
        link = layout.mesh.link_names.index(HOST_LINKS[COPIES.index(kind)])
        return (PricedStep(kind, link, num_bytes, copy_ns(num_bytes, cluster.host), launch_ns),)

    for away in layout.away:
        for kind in COPIES:
            found[copy_key(away, layout, kind)] = priced(kind, away.root, layout.kept(away.root))
    for each in layout.streamed:
        for copy in copies_of(each, layout):
            found[copy.key] = priced(copy.kind, each.param, layout.made(each.param))
    return found


def host_contention(cluster: Cluster) -> tuple[int, int]:
    """By how much the device and a copy, either way, slow each other down, in thousandths, as
    `hardware.Hardware` has it: a copy takes its part of the bandwidth of the device's memory."""
    part = min(1.0, cluster.host.bytes_per_s / cluster.device.memory_bytes_per_s)
    return round(part * _THOUSAND), round(part * _THOUSAND)
