"""What the host of a GPU does for an op: it launches kernels and collectives, one after the other.

A CPU launches its own kernels, which is part of their prices (`mesh.Device.floor_s`). What the
optimizer launches is not counted: it is the same for every plan, and comes when all else is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.kernels import LAUNCHES_PER_COLLECTIVE
from autopar.cost_model.kernel_cost import Traffic, is_fusible
from autopar.cost_model.moves import to_ns
from autopar.ir.choices import Choice
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Device
from autopar.rules.work import busiest_work


def host_ns(
    graph: Graph,
    node: Node,
    done: Traffic,
    choice: Choice,
    sizes: Sequence[int],
    device: Device,
    num_sent: int,
) -> int:
    """Nanoseconds in which the host launches an op that sends `num_sent` collectives."""
    if not device.host_launch_s:
        return 0
    launches = _kernels(graph, node, done, choice, sizes) + LAUNCHES_PER_COLLECTIVE * num_sent
    return to_ns(launches * device.host_launch_s)


def _kernels(graph: Graph, node: Node, done: Traffic, choice: Choice, sizes: Sequence[int]) -> int:
    """How many kernels a rank launches for an op: none of its own for one that is a part of
    another's (`kernel_cost`)."""
    if is_fusible(node):
        return int(any(done.writes))
    work = busiest_work(graph, node, choice, sizes)
    passes = work.passes if work.products is None else sum(p.count for p in work.products)
    return passes + work.merges * work.merge_launches
