"""Seconds of one collective on one mesh axis, and bucket sizes that make its start a small part.

    seconds = start + sent V / rate + knee sqrt(start V / rate)

V are the bytes of the unsharded side of the local tensor (all_reduce: the tensor; all_gather: the
output; reduce_scatter, all_to_all and permute: the input). `sent` is how often each byte crosses
the link. Between n ranks:

    all_gather, reduce_scatter    ring                (n - 1)/n
    all_to_all                    pairwise exchange   (n - 1)/n
    all_reduce                    ring or tree        2 (n - 1)/n
    permute                       to the next         1
    slice                         local               costs nothing

Start, rate and knee are measured (`mesh.Curve`), and interpolated between numbers of ranks along
their logarithms. The term of the root is the part of a message that is sent before the links are
full. Without it, the law misses measured times from 64 KiB to 16 MiB by 10 to 20 % (median).

A collective without measured figures follows Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), with the link's start s, latency a per step
and efficiency, and no knee: all_gather, reduce_scatter and all_to_all start in s + (n - 1) a, a
permute in s + a, a ring's all_reduce in s + 2 (n - 1) a. NCCL's other all_reduce is the pipelined
double binary tree of Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009): s + 2 ceil(log2 n) a + 2 V / rate. Gloo has rings alone, and its
reduce_scatter is an all_reduce (`findings/gloo_reduce_scatter_bytes.sh`).

Over several nodes a ring goes through all adapters of a node at once, and through its inner link. A
measured all_reduce adds up within the nodes first, so that its bytes cross the network 2 (m - 1)/m
times, between m nodes. An exchange or a permutation sends through each device's own adapter to
other nodes. An all_reduce never costs more than a reduce_scatter and an all_gather, a ring, or a
tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2

import numpy as np

from autopar.cluster.curves import crossing
from autopar.ir.mesh import BUCKET_BYTES, Axis, Curve, Device, Mesh
from autopar.ir.redistribute import KINDS


@dataclass(frozen=True, slots=True)
class _Law:
    """`start_s + byte_s V + root_s sqrt(V)` seconds for V bytes."""

    start_s: float
    byte_s: float
    root_s: float = 0.0

    def seconds(self, num_bytes: int, latency_share: float) -> float:
        seconds = latency_share * self.start_s + self.byte_s * num_bytes
        if self.root_s:
            seconds += self.root_s * np.sqrt(latency_share * num_bytes)
        return seconds

    def __add__(self, other: _Law) -> _Law:
        return _Law(
            self.start_s + other.start_s,
            self.byte_s + other.byte_s,
            self.root_s + other.root_s,
        )


def collective_s(
    kind: str, in_bytes: int, out_bytes: int, axis: Axis, latency_share: float = 1.0
) -> float:
    """Seconds of collective `kind` over `axis`, all of whose groups run it at once.

    `in_bytes` and `out_bytes` are the bytes of one rank's input and output. `latency_share` is the
    part of the start that falls to them, where other tensors are in the same message. The root is
    that of the whole message: V of its M bytes bear V / M of sqrt(M), which is sqrt(share V) for a
    share V / M. The result is continuous and never falls as the bytes grow. ValueError if `kind` is
    unknown or the bytes contradict it. For arrays of bytes and shares, the result is an array.
    """
    whole = _whole_bytes(kind, in_bytes, out_bytes)
    if axis.size == 1 or kind == "slice":
        return 0.0
    first, *others = (law.seconds(whole, latency_share) for law in _laws(kind, axis))
    return np.minimum(first, others[0]) if others else first


def _laws(kind: str, axis: Axis) -> Iterator[_Law]:
    """The laws of the algorithms for this collective: one or two."""
    n, link = axis.size, axis.crossed
    measured = _measured(kind, axis)
    rate = link.efficiency * link.bytes_per_s
    if kind == "all_reduce" and measured:
        yield measured
        yield _ring("reduce_scatter", axis) + _ring("all_gather", axis)
    elif measured:
        yield measured
    elif kind == "all_reduce" or (kind == "reduce_scatter" and link.is_gloo):
        byte_s = _ring_byte_s("all_gather", rate, axis)
        yield _Law(link.start_s + 2 * (n - 1) * link.latency_s, 2 * (n - 1) / n * byte_s)
        if not link.is_gloo:
            yield _Law(link.start_s + 2 * (n - 1).bit_length() * link.latency_s, 2 * byte_s)
    elif kind == "permute":
        yield _Law(link.start_s + link.latency_s, 1 / rate)
    elif kind == "all_to_all":
        yield _Law(link.start_s + (n - 1) * link.latency_s, (n - 1) / n / rate)
    else:
        yield _ring(kind, axis)


def _ring(kind: str, axis: Axis) -> _Law:
    """An all_gather or a reduce_scatter."""
    n, link = axis.size, axis.crossed
    byte_s = _ring_byte_s(kind, link.efficiency * link.bytes_per_s, axis)
    start_s = link.start_s + (n - 1) * link.latency_s
    return _measured(kind, axis) or _Law(start_s, (n - 1) / n * byte_s)


def _ring_byte_s(kind: str, adapter_bytes_per_s: float, axis: Axis) -> float:
    """Seconds per byte that a ring passes on, through the adapters of a node and its inner link."""
    through = 1 / (adapter_bytes_per_s * axis.shared)
    within = _within(axis)
    return through if within is None else max(through, _inner_byte_s(kind, within))


def _inner_byte_s(kind: str, within: Axis) -> float:
    n = within.size
    return _ring(kind, within).byte_s * n / (n - 1)


def _within(axis: Axis) -> Axis | None:
    """The ranks of one group in one node."""
    return Axis(axis.name, axis.shared, axis.inner) if axis.inner and axis.shared > 1 else None


def _measured(kind: str, axis: Axis) -> _Law | None:
    """The law by the link's measured curves; None without any."""
    link, n, within = axis.crossed, axis.size, _within(axis)
    curve = _between(kind, axis)
    if curve is None:
        return None
    sent, adapters = crossing(kind, n, axis.sides, axis.shared)
    link_byte_s = 1 / (curve.reach * link.bytes_per_s * adapters)
    byte_s = sent * link_byte_s
    # A curve measured with as many ranks per side includes the time of the inner link.
    if adapters > 1 and within is not None and curve.shared != axis.shared:
        if kind == "all_reduce":
            byte_s = max(byte_s, min(law.byte_s for law in _laws(kind, within)))
        else:
            link_byte_s = max(link_byte_s, _inner_byte_s(kind, within))
            byte_s = sent * link_byte_s
    return _Law(curve.start_s, byte_s, curve.knee * (curve.start_s * link_byte_s) ** 0.5)


def _between(kind: str, axis: Axis) -> Curve | None:
    """The curve for the axis' number of sides, among those measured with the closest number of
    ranks on each side. Between two curves it is linear in the logarithm. Beyond the last the start
    goes on as before, and all else stays."""
    sides = axis.sides
    curves = [curve for curve in axis.crossed.curves if curve.kind == kind]
    if not curves:
        return None
    beside = axis.shared
    shared = min({c.shared for c in curves}, key=lambda n: (abs(log2((n or beside) / beside)), -n))
    known = [curve for curve in curves if curve.shared == shared]
    high = next((k for k, curve in enumerate(known) if curve.ranks >= sides), len(known) - 1)
    low, up = known[max(0, high - 1)], known[high]
    if low is up or sides <= low.ranks:
        return low
    fraction = log2(sides / low.ranks) / log2(up.ranks / low.ranks)
    part = min(fraction, 1.0)
    return Curve(
        kind,
        sides,
        low.start_s + fraction * (up.start_s - low.start_s),
        1 / ((1 - part) / low.reach + part / up.reach),
        low.knee + part * (up.knee - low.knee),
        shared,
    )


def _whole_bytes(kind: str, in_bytes: int, out_bytes: int) -> int:
    """Bytes of the side of the local tensor that is not sharded over the axis. For an all_to_all,
    those of the larger shard: the shards differ where a dim does not divide."""
    smaller, larger = np.minimum(in_bytes, out_bytes), np.maximum(in_bytes, out_bytes)
    if (smaller < 0).any():
        raise ValueError(f"{kind}: negative bytes ({in_bytes} in, {out_bytes} out)")
    match kind:
        case "all_reduce" | "permute":
            plausible = smaller == larger
        case "all_gather":
            plausible = larger == out_bytes
        case "reduce_scatter" | "slice":
            plausible = larger == in_bytes
        case "all_to_all":
            plausible = np.True_
        case _:
            raise ValueError(f"unknown collective {kind!r} (known: {', '.join(KINDS)})")
    if not plausible.all():
        raise ValueError(f"{kind} cannot turn {in_bytes} local bytes into {out_bytes}")
    return larger


# The bytes of a bucket, by mesh axis: enough that the start is a small part of its time.
#
# The start of an all-gather takes as long as its link takes for 4 MB among 8 ranks on NVLink 4.
# Among 512 over NDR, where a ring has 511 steps, it is 850 MB, and over Ethernet of 1 Gb/s 0.1 MB.
# A larger bucket delays the first message, and takes more memory.

START_PART = 0.2
"""The largest part of a full bucket's time that is its start. On 512 H100 in nodes of 8, the
simulated step of an 8B Llama with FSDP takes 1,120 ms with buckets of 25 MiB. It takes 406 ms with
400 MiB, and 276 ms with 1,000."""

SMALL_START_PART = 0.05
"""The same for a bucket that is smaller than `mesh.BUCKET_BYTES`. With n buckets, the last one, 1/n
of all bytes, has nothing to hide behind. From n = 10 on, 1 + 1/20 + 1/n of the time is little."""

LEAST_BYTES = BUCKET_BYTES // 16
"""The smallest bucket."""

MEMORY_PART = 1 / 64
"""The largest part of a device's memory that a bucket takes."""


def with_buckets(mesh: Mesh, device: Device) -> Mesh:
    """`mesh` with the bytes of its buckets: `mesh.BUCKET_BYTES`, halved or doubled.

    On slow links with short starts they are halved while the start is at most `SMALL_START_PART`.
    Where starts are long they are doubled until the start is at most `START_PART`, or as far as
    memory allows.
    """
    return Mesh(tuple(replace(axis, bucket_bytes=_bucket_bytes(axis, device)) for axis in mesh))


def _bucket_bytes(axis: Axis, device: Device) -> int:
    bucket_bytes = BUCKET_BYTES
    while bucket_bytes > LEAST_BYTES and _start_part(axis, bucket_bytes // 2) <= SMALL_START_PART:
        bucket_bytes //= 2
    while _start_part(axis, bucket_bytes) > START_PART:
        if 2 * bucket_bytes > MEMORY_PART * device.memory_bytes:
            break
        bucket_bytes *= 2
    return bucket_bytes


def _start_part(axis: Axis, bucket_bytes: int) -> float:
    """The part of a bucket's all-gather that is its start; 0 where nothing is sent."""
    whole_s = collective_s("all_gather", bucket_bytes // axis.size, bucket_bytes, axis)
    return collective_s("all_gather", 0, 0, axis) / whole_s if whole_s else 0.0
