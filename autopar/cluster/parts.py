"""Parts of a cluster, one for each rank of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.errors import ClusterError
from autopar.ir.mesh import Axis, Cluster, Level, Link


def has_parts(cluster: Cluster, devices: int) -> bool:
    """Whether `cluster` divides into parts of so many devices. At each level, a part must lie
    within one group (such as a node), or consist of whole groups."""
    left = devices
    for level in reversed(cluster.levels):
        if left % level.size and level.size % left:
            return False
        left //= min(left, level.size)
    return left == 1


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of so many neighbouring devices of `cluster`. ClusterError if they neither lie
    within one group of a level, such as a node, nor consist of whole groups."""
    if devices == cluster.num_devices:
        return cluster
    levels: list[Level] = []
    left = devices
    for level in reversed(cluster.levels):
        if left > level.size and left % level.size:
            raise ClusterError(
                f"cluster {cluster.name} has no even parts of {devices} devices: "
                f"{left} are no multiple of {level.size}"
            )
        levels.append(replace(level, size=min(left, level.size)))
        left //= min(left, level.size)
    if left > 1:
        raise ClusterError(f"cluster {cluster.name} has no {devices} devices")
    kept = tuple(level for level in reversed(levels) if level.size > 1)
    return replace(
        cluster,
        name=f"{devices} of {cluster.name}",
        levels=kept or (replace(cluster.levels[-1], size=1),),
    )


def sizes_of_parts(cluster: Cluster, ranks: int) -> tuple[int, ...]:
    """The sizes of parts, largest first, that are nearest to an even division of `cluster` among so
    many ranks. Each is a multiple of the next, so that any number of them lie evenly. Within one
    node any sizes do: where multiples cannot add up to all devices, the sizes differ by one."""
    devices = cluster.num_devices
    possible = [size for size in range(1, devices) if has_parts(cluster, size)]
    base = max((size for size in possible if size * ranks <= devices), default=1)
    larger = [size for size in possible if size > base and size % base == 0]
    smaller = [size for size in possible if size < base and base % size == 0]
    sizes = (*larger[:1], base, *smaller[-1:])
    if len(cluster.levels) == 1 and ranks <= devices and not add_up_to(devices, ranks, sizes):
        return (devices // ranks + 1, devices // ranks)
    return sizes


def add_up_to(devices: int, ranks: int, sizes: Sequence[int]) -> bool:
    """Whether so many ranks can have all devices, where each has one of `sizes`."""
    if not ranks or not sizes:
        return ranks == devices == 0
    most = min(ranks, devices // sizes[0])
    return any(add_up_to(devices - n * sizes[0], ranks - n, sizes[1:]) for n in range(most + 1))


def place_parts(cluster: Cluster, sizes: Sequence[int]) -> tuple[int, ...]:
    """The first device of each part, where parts of these `sizes` make up `cluster`. The parts
    follow one another in order if all of them lie evenly so, else larger ones first. ClusterError
    if neither is possible."""
    if sum(sizes) != cluster.num_devices:
        raise ClusterError(
            f"parts of {', '.join(map(str, sizes))} devices are {sum(sizes)}, but cluster "
            f"{cluster.name} has {cluster.num_devices}"
        )
    for size in sizes:
        part_of(cluster, size)
    for order in (range(len(sizes)), sorted(range(len(sizes)), key=lambda k: -sizes[k])):
        ends = accumulate(sizes[k] for k in order)
        firsts = {k: end - sizes[k] for k, end in zip(order, ends, strict=True)}
        if all(_lies_evenly(cluster, first, sizes[k]) for k, first in firsts.items()):
            return tuple(firsts[k] for k in range(len(sizes)))
    raise ClusterError(
        f"parts of {', '.join(map(str, sizes))} devices do not lie evenly in cluster {cluster.name}"
    )


def _lies_evenly(cluster: Cluster, first: int, size: int) -> bool:
    """Whether `size` devices from `first` on lie, at each level, within one group (such as a node),
    or are whole groups."""
    block, is_even = cluster.num_devices, True
    for level in cluster.levels:
        block //= level.size
        ends = first // block, (first + size - 1) // block
        is_even &= ends[0] == ends[1] if size <= block else first % block == size % block == 0
    return is_even


def axis_between(cluster: Cluster, source: int, target: int, parts: int) -> Axis:
    """The axis along which one of so many `parts` sends to another, while others do the same. The
    two parts begin with the devices `source` and `target`."""
    return Axis("stage", parts, slowest_between(cluster, (source, target)))


def axis_of_copies(cluster: Cluster, firsts: Sequence[int]) -> Axis:
    """The axis that joins devices in the same place of several parts, over the slowest of the links
    between these. The parts begin with the devices `firsts`."""
    return Axis("stage", len(firsts), slowest_between(cluster, firsts))


def slowest_between(cluster: Cluster, firsts: Sequence[int]) -> Link:
    """The slowest of the links between parts that lie evenly in `cluster` and begin with the
    devices `firsts`, which differ."""
    crossed: list[Link] = []
    block = cluster.num_devices
    for level in cluster.levels:
        block //= level.size
        if len({first // block for first in firsts}) > 1:
            crossed.append(level.link)
    return min(crossed, key=lambda link: link.bytes_per_s)
