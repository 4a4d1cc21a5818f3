"""Meshes over a whole cluster: parsing one, and listing the candidates of a search.

Ranks lie row-major on the devices of the cluster, its outermost level first, so that the last axis
of a mesh connects the nearest neighbours. An axis has the slowest link that any of its groups
crosses: inside a node that is the node's link, across nodes the network's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from numbers import Integral
from typing import Any

from autopar.errors import ArgumentError, ClusterError
from autopar.ir.mesh import Axis, Cluster, Link, Mesh

_NAMES: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("dp",),
    2: ("dp", "tp"),
    3: ("dp", "cp", "tp"),
}
_EXAMPLES = "for example 8x8, dp=8,tp=8 or 8"

MeshLike = str | int | Sequence[int] | Mapping[str, int] | None
"""A mesh as text, its number of ranks, its sizes, or sizes by name; None for the best of all."""


def read_mesh(mesh: MeshLike) -> str:
    """`mesh` as text: `2x4` for (2, 4), `dp=2,tp=4` for {"dp": 2, "tp": 4}. ArgumentError if `mesh`
    is no mesh."""
    if mesh is None:
        return "auto"
    if isinstance(mesh, str):
        return mesh
    if isinstance(mesh, Mapping) and all(map(_is_size, mesh.values())):
        return ",".join(f"{name}={size}" for name, size in mesh.items())
    sizes: Sequence[Any] = mesh if isinstance(mesh, Sequence) else (mesh,)
    if all(map(_is_size, sizes)):
        return "x".join(map(str, sizes))
    raise ArgumentError(
        f'mesh={mesh!r} is no mesh: write sizes, slowest axis first, as (2, 4), "2x4" or '
        '{"dp": 2, "tp": 4}, or leave it out for the best of all'
    )


def _is_size(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def parse_mesh(text: str, cluster: Cluster) -> Mesh:
    """The mesh that `text` describes over all devices of `cluster`; the inverse of `str(mesh)`.

    `8x8` gives sizes, outermost first, and default names; `dp=8,tp=8` gives names as well. Axes of
    size 1 are left out of the result. ClusterError if the text is malformed or if the sizes do not
    multiply to the number of devices.
    """
    names, sizes = _axes(text)
    size, present = prod(sizes), cluster.num_devices
    if size != present:
        raise ClusterError(
            f"mesh {text!r} has {size} device{'s' * (size != 1)}, but cluster {cluster.name} "
            f"has {present}: choose sizes that multiply to {present}"
        )
    return _lay(names, sizes, cluster)


def size_of_mesh(text: str) -> int:
    """The number of devices of the mesh that `text` describes. ClusterError if it is malformed."""
    return prod(_axes(text)[1])


def candidate_meshes(
    cluster: Cluster, max_axes: int = 2, *, in_order: bool = False
) -> tuple[Mesh, ...]:
    """Every mesh of 1 to `max_axes` axes, each of size 2 or more, over all devices of `cluster`.

    Fewer axes first, then by sizes. Meshes whose axes have the same sizes over the same links, in
    any order, have the same plans at the same cost, and only the first is listed. With `in_order`
    all are listed, for users who name an axis or its place. One device gives the mesh without axes.
    ClusterError unless 1 <= `max_axes` <= 3.
    """
    if not 1 <= max_axes < len(_NAMES):
        raise ClusterError(f"a mesh search takes 1 to {len(_NAMES) - 1} axes, not {max_axes}")
    if cluster.num_devices == 1:
        return (Mesh(()),)
    meshes: dict[tuple[_Signature, ...], Mesh] = {}
    for num_axes in range(1, max_axes + 1):
        for sizes in _factorizations(cluster.num_devices, num_axes):
            mesh = _lay(_NAMES[num_axes], sizes, cluster)
            signatures = map(_signature, mesh.axes)
            meshes.setdefault(tuple(signatures if in_order else sorted(signatures)), mesh)
    return tuple(meshes.values())


@dataclass(frozen=True, slots=True)
class KindOfAxis:
    """Axes with equal prices of collectives: groups of `ranks`, each `stride` from the one before,
    that lie on `sides` sides of the link of `level` (0 the innermost), `shared` of them on each."""

    level: int
    ranks: int
    stride: int
    sides: int
    shared: int

    def groups(self, num_devices: int) -> list[list[int]]:
        """All groups of such an axis over so many devices."""
        span = self.ranks * self.stride
        firsts = (b + k for b in range(0, num_devices, span) for k in range(self.stride))
        return [list(range(first, first + span, self.stride)) for first in firsts]

    def __str__(self) -> str:
        return f"among {self.sides} sides of {self.shared} on level {self.level}"


def kinds_of_axes(cluster: Cluster) -> tuple[KindOfAxis, ...]:
    """The kinds of axes that meshes over all of `cluster` can have, each once: those of more than
    one rank whose ranks lie evenly. An axis crosses the outermost possible link."""
    # That is the slowest one, if rates rise inwards.
    depth, n = len(cluster.levels), cluster.num_devices
    ordered = tuple(
        replace(each, link=replace(each.link, name=str(depth - 1 - k), bytes_per_s=k + 1))
        for k, each in enumerate(cluster.levels)
    )
    kinds: dict[tuple[int, int, int], KindOfAxis] = {}
    for ranks in (size for size in range(2, n + 1) if n % size == 0):
        for stride in (s for s in range(1, n // ranks + 1) if n // ranks % s == 0):
            axis = axis_over("", ranks, stride, replace(cluster, levels=ordered))
            if axis.sides * axis.shared == ranks:
                level = int(axis.crossed.name)
                kind = KindOfAxis(level, ranks, stride, axis.sides, axis.shared)
                kinds.setdefault((level, axis.shared, axis.sides), kind)
    return tuple(kinds[key] for key in sorted(kinds))


def _lay(names: tuple[str, ...], sizes: tuple[int, ...], cluster: Cluster) -> Mesh:
    """Axes of more than one rank, laid row-major over the cluster."""
    return Mesh(
        tuple(
            axis_over(name, size, prod(sizes[k + 1 :]), cluster)
            for k, (name, size) in enumerate(zip(names, sizes, strict=True))
            if size > 1
        )
    )


def axis_over(name: str, size: int, stride: int, cluster: Cluster) -> Axis:
    """The axis whose groups are ranks first, first + stride, ..., `size` of them, for some first.

    A group of the axis lies in an aligned range of stride * size ranks. Blocks of `block` ranks
    below a level hold all groups whole exactly if that range divides them; a stride that is a
    multiple of the level's whole extent moves outside it only.
    """
    crossed: list[tuple[Link, int]] = []
    block = cluster.num_devices
    for level in cluster.levels:
        extent, block = block, block // level.size
        if level.size > 1 and block % (stride * size) and stride % extent:
            crossed.append((level.link, max(1, block // stride)))
    slowest = min(crossed, key=lambda pair: (pair[0].bytes_per_s, -pair[0].latency_s))
    link, shared = slowest
    below = (other for other, _ in crossed[crossed.index(slowest) + 1 :])
    inner = min(below, key=lambda link: link.bytes_per_s, default=None)
    # A group that starts in the middle of a node has half of its ranks there at most.
    shared = min(shared, size // 2)
    return Axis(name, size, link, shared, inner) if inner and shared > 1 else Axis(name, size, link)


_LinkSignature = tuple[float, float, float, str]
_Signature = tuple[int, int, _LinkSignature, _LinkSignature]


def _signature(axis: Axis) -> _Signature:
    """What the prices on an axis depend on."""
    return axis.size, axis.shared, _link_signature(axis.crossed), _link_signature(axis.inner)


def _link_signature(link: Link | None) -> _LinkSignature:
    return (link.bytes_per_s, link.latency_s, link.start_s, link.name) if link else (0, 0, 0, "")


def _factorizations(n: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorizations of `n` into `num_factors` factors of 2 or more, in ascending order."""
    if num_factors == 1:
        yield (n,)
        return
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in _factorizations(n // first, num_factors - 1))


def _axes(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes."""
    if "=" not in text:
        return _sized(text)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (token.strip() for token in part.partition("="))
        if not (equals and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)):
            raise ClusterError(f"mesh {text!r}: {part.strip()!r} is not name=size ({_EXAMPLES})")
        if name in sizes:
            raise ClusterError(f"mesh {text!r} has two axes named {name!r}: name them differently")
        sizes[name] = _size(size, text)
    return tuple(sizes), tuple(sizes.values())


def _sized(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    sizes = tuple(_size(part.strip(), text) for part in text.lower().split("x")) if text else ()
    if len(sizes) not in _NAMES:
        raise ClusterError(
            f"mesh {text!r} has {len(sizes)} axes, and default names end at {len(_NAMES) - 1}: "
            "name them, as in a=2,b=2,c=2,d=2"
        )
    return _NAMES[len(sizes)], sizes


def _size(token: str, text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", token, re.ASCII):
        raise ClusterError(f"mesh {text!r}: {token!r} is not a size of 1 or more ({_EXAMPLES})")
    return int(token)
