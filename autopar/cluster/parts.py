"""Parts of a cluster that a stage of a pipeline has to itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster.mesh_shapes import axis_over
from autopar.errors import ClusterError
from autopar.ir.mesh import Axis, Cluster, Level, Link


def has_parts(cluster: Cluster, devices: int) -> bool:
    """Whether groups of so many devices that are next to each other lie evenly in `cluster`."""
    try:
        part_of(cluster, devices)
    except ClusterError:
        return False
    return True


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of so many devices of `cluster` that are next to each other. ClusterError if
    groups of that many lie unevenly in it."""
    if devices == cluster.num_devices:
        return cluster
    levels: list[Level] = []
    left = devices
    for level in reversed(cluster.levels):
        if left % level.size and level.size % left:
            raise ClusterError(
                f"cluster {cluster.name} has no even parts of {devices} devices: "
                f"{left} and {level.size} do not divide one another"
            )
        levels.append(replace(level, size=min(left, level.size)))
        left //= min(left, level.size)
    if left > 1:
        raise ClusterError(f"cluster {cluster.name} has no {devices} devices")
    inner = cluster.levels[-1]
    kept = tuple(level for level in reversed(levels) if level.size > 1)
    name = f"{devices} of {cluster.name}"
    return replace(cluster, name=name, levels=kept or (replace(inner, size=1),))


def line_of(cluster: Cluster, stages: int) -> Axis:
    """The axis along which the devices of so many equal stages, one part after the other, send
    each other what they make."""
    return axis_over("stage", stages, cluster.num_devices // stages, cluster)


def axis_of_copies(cluster: Cluster, firsts: Sequence[int]) -> Axis:
    """The axis along which the devices of the parts that begin with the devices `firsts` are joined
    to those in the same place of the others, over the slowest of the links between them."""
    crossed: list[Link] = []
    block = cluster.num_devices
    for level in cluster.levels:
        block //= level.size
        if len({first // block for first in firsts}) > 1:
            crossed.append(level.link)
    return Axis("stage", len(firsts), min(crossed, key=lambda link: link.bytes_per_s))
