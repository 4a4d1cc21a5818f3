"""What copies of tensors in the memory of the host take."""

from __future__ import annotations

from autopar.cost_model.event_prices import PricedStep
from autopar.cost_model.moves import to_ns
from autopar.ir.mesh import HOST_LINKS, Cluster, Host
from autopar.plans.host_copies import COPIES, copy_key
from autopar.plans.layout import Layout

_THOUSAND = 1000


def copy_ns(num_bytes: int, host: Host) -> int:
    """How long the link to the host is busy with a tensor, either way: `Host.bytes_per_s` is what
    it has where all devices of a node copy at once."""
    return to_ns(host.latency_s + num_bytes / host.bytes_per_s)


def copies(layout: Layout, cluster: Cluster) -> dict[str, tuple[PricedStep]]:
    """The copies of what is offloaded, by their key."""
    links = layout.mesh.link_names
    found: dict[str, tuple[PricedStep]] = {}
    for away in layout.away:
        num_bytes = layout.held_bytes(away.root, layout.kept(away.root))
        ns = copy_ns(num_bytes, cluster.host)
        launch_ns = to_ns(cluster.device.host_launch_s)
        for kind, link in zip(COPIES, HOST_LINKS, strict=True):
            step = PricedStep(kind, links.index(link), num_bytes, ns, launch_ns)
            found[copy_key(away, layout, kind)] = (step,)
    return found


def host_contention(cluster: Cluster) -> tuple[int, int]:
    """By how much the device and a copy, either way, slow each other down, in thousandths, as
    `hardware.Hardware` has it: a copy takes its part of the bandwidth of the device's memory."""
    part = min(1.0, cluster.host.bytes_per_s / cluster.device.memory_bytes_per_s)
    return round(part * _THOUSAND), round(part * _THOUSAND)
