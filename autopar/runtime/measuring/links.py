"""Times of collectives on each kind of axis that a mesh over the cluster can have, in all of its
groups at once, and beside matmuls.

They are the collectives that autopar's graphs call, with their waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.cluster.mesh_shapes import KindOfAxis, kinds_of_axes
from autopar.cluster.profile import Overlap, Sent
from autopar.ir.mesh import Cluster
from autopar.runtime.measuring.stopwatch import Stopwatch, Timed, random

_c10d = torch.ops._c10d_functional
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
_LONGEST_NS = 100_000_000
"""Once a message takes longer, larger ones are extrapolated from their bytes."""
_SIDE = {"cuda": (4096, "bfloat16"), "cpu": (256, "float32")}
"""The square that is multiplied beside a collective, and its dtype."""
_BESIDE_NS = 30_000_000
_ITEM_BYTES = 4


def collectives(watch: Stopwatch, cluster: Cluster) -> Iterator[Sent]:
    """Those of each kind, axis and size, sizes ascending."""
    for axis in kinds_of_axes(cluster):
        with _group(axis, cluster.num_devices) as group:
            for kind in _KINDS:
                yield from _messages(watch, kind, axis, group)


def overlaps(watch: Stopwatch, cluster: Cluster, sent: tuple[Sent, ...]) -> Iterator[Overlap]:
    """Gathers beside as many matmuls as take equally long, on the axis of each level with the most
    ranks. Taken are the largest gathers in `sent` that take less than `_BESIDE_NS`."""
    last = {axis.level: axis for axis in sorted(kinds_of_axes(cluster), key=lambda a: a.ranks)}
    for level, axis in sorted(last.items()):
        gathers = [
            each
            for each in sent
            if (each.kind, each.level, each.sides, each.shared)
            == ("all_gather", level, axis.sides, axis.shared)
        ]
        short = [each for each in gathers if each.time_ns < _BESIDE_NS] or gathers[:1]
        with _group(axis, cluster.num_devices) as group:
            for each in short[-watch.cases.pairs :]:
                yield from _beside(watch, each, axis, group)


def _messages(
    watch: Stopwatch, kind: str, axis: KindOfAxis, group: dist.ProcessGroup
) -> Iterator[Sent]:
    for size in watch.cases.messages:
        items = axis.ranks * -(-size // (_ITEM_BYTES * axis.ranks))
        name = f"{kind} of {_ITEM_BYTES * items} bytes {axis}"
        prepare = partial(_waited, watch.device, kind, items, axis.ranks, group)
        times_ns = watch.attempt(name, 3 * _ITEM_BYTES * items, prepare)
        if times_ns is None:
            continue
        place = axis.level, kind, axis.ranks, axis.sides, axis.shared
        yield Sent(*place, _ITEM_BYTES * items, times_ns[0])
        if times_ns[0] > _LONGEST_NS:
            break


def _beside(
    watch: Stopwatch, sent: Sent, axis: KindOfAxis, group: dist.ProcessGroup
) -> list[Overlap]:
    side, dtype = _SIDE[watch.device.type]

    def one() -> tuple[Timed]:
        a, b, out = (random(watch.device, side, side, dtype=dtype) for _ in range(3))
        return (lambda: torch.mm(a, b, out=out),)

    once_ns = watch.attempt(f"matmul beside {axis}", 0, one)
    if once_ns is None:
        return []
    runs = max(1, round(sent.time_ns / once_ns[0]))

    def prepare() -> tuple[Timed, Timed, Timed]:
        (multiply,) = one()
        items = sent.num_bytes // _ITEM_BYTES
        send = _collective(watch.device, sent.kind, items, sent.ranks, group)

        def compute() -> None:
            for _ in range(runs):
                multiply()

        def both() -> None:
            landing = send()
            compute()
            _c10d.wait_tensor(landing)

        return compute, lambda: _c10d.wait_tensor(send()), both

    name = f"{runs} matmuls beside {sent.kind} of {sent.num_bytes} bytes {axis}"
    times_ns = watch.attempt(name, 3 * sent.num_bytes, prepare)
    return [Overlap(axis.level, *times_ns)] if times_ns else []


def _waited(
    device: torch.device, kind: str, items: int, ranks: int, group: dist.ProcessGroup
) -> tuple[Timed]:
    send = _collective(device, kind, items, ranks, group)
    return (lambda: _c10d.wait_tensor(send()),)


def _collective(
    device: torch.device, kind: str, items: int, ranks: int, group: dist.ProcessGroup
) -> Callable[[], torch.Tensor]:
    """A function that starts the collective on a local tensor, which has `items` elements
    unsharded."""
    name = group.group_name
    x = random(device, items // ranks if kind == "all_gather" else items)
    match kind:
        case "all_gather":
            return lambda: _c10d.all_gather_into_tensor(x, ranks, name)
        case "reduce_scatter":
            return lambda: _c10d.reduce_scatter_tensor(x, "sum", ranks, name)
        case "all_reduce":
            return lambda: _c10d.all_reduce(x, "sum", name)
        case "all_to_all":
            sizes = [items // ranks] * ranks
            return lambda: _c10d.all_to_all_single(x, sizes, sizes, name)
        case _:
            me, none = dist.get_rank(group), [0] * ranks
            sends, gets = none.copy(), none.copy()
            sends[(me + 1) % ranks] = gets[(me - 1) % ranks] = items
            return lambda: _c10d.all_to_all_single(x, gets, sends, name)


@contextmanager
def _group(axis: KindOfAxis, world_size: int) -> Generator[dist.ProcessGroup]:
    """This rank's group on the axis, all of whose groups are made."""
    torch_dist: Any = torch.distributed  # Its types are there in part.
    groups = [torch_dist.new_group(ranks) for ranks in axis.groups(world_size)]
    (group,) = (each for each in groups if isinstance(each, dist.ProcessGroup))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
