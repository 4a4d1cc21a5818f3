"""The cost of one redistribution step on one rank: the collective, and the copies into and out of
its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from autopar.cluster.kernels import LAUNCHES_PER_COLLECTIVE
from autopar.cost_model.collectives import collective_s
from autopar.errors import ClusterError
from autopar.ir.buckets import Sharing, can_share
from autopar.ir.choices import Choice
from autopar.ir.graph import Atom, Graph, Node, TensorType
from autopar.ir.mesh import Device, Mesh
from autopar.ir.problem import IntArray
from autopar.ir.redistribute import Collective, buffer_bytes, layout_copies
from autopar.ir.sharding import Sharding
from autopar.rules.op import Exchange
from autopar.rules.work import exchanges

NS = 1e9
_MOST_S = 2.0**20
"""Twelve days: a longer time comes of a wrong figure, and sums must fit 64 bits."""


def to_ns(seconds: float) -> int:
    """Whole nanoseconds, rounded: prices are integers so that sums can be checked exactly.
    ClusterError if no step can take that long."""
    if not seconds <= _MOST_S:
        raise _endless(seconds)
    return round(seconds * NS)


def _all_to_ns(seconds: npt.NDArray[np.float64]) -> IntArray:
    """`to_ns` of each."""
    if not np.all(seconds <= _MOST_S):
        raise _endless(float(seconds.max()))
    return np.rint(seconds * NS).astype(np.int64)


def _endless(seconds: float) -> ClusterError:
    return ClusterError(
        f"with the figures of this cluster, one op or redistribution takes {seconds:.3g} s: raise "
        "the bandwidth or the FLOPs per second that are too small for the model, or lower the "
        "latency that is too large"
    )


def move_ns(
    tensor: TensorType,
    atoms: Sequence[Atom],
    source: Sharding,
    target: Sharding,
    move: Collective,
    mesh: Mesh,
    device: Device,
    *,
    sharing: Sharing | None,
) -> tuple[int, int]:
    """`moves_ns` of one tensor between two states."""
    where = tensor, atoms, [(source, target)], move, mesh, device
    device_ns, host_ns = moves_ns(*where, sharing=sharing)
    return int(device_ns[0]), int(host_ns[0])


def moves_ns(
    tensor: TensorType,
    atoms: Sequence[Atom],
    pairs: Sequence[tuple[Sharding, Sharding]],
    move: Collective,
    mesh: Mesh,
    device: Device,
    *,
    sharing: Sharing | None,
) -> tuple[IntArray, IntArray]:
    """Nanoseconds of `move` = step(source, target) for each of `pairs`: on the device, with the
    copies into and out of buffers, and on the host, which launches the move and its copies.

    Both results have a row per pair. `tensor` may stand for many tensors: sizes of atoms are then
    arrays with an entry for each, and rows have a column for each.

    In a bucket (`sharing` is not None), a tensor bears a part of the latency and is copied into
    the bucket, and after a gather out of it; uneven chunks are sent alone.
    """
    buffers = np.empty((4, len(pairs), *np.shape(tensor.num_bytes)), np.int64)
    for k, (source, target) in enumerate(pairs):
        where = tensor, atoms, source, target, move, mesh.sizes
        buffers[0, k], buffers[1, k] = buffer_bytes(*where)
        buffers[2, k], buffers[3, k] = layout_copies(*where)
    in_bytes, out_bytes, sent, brought = cast("tuple[int, ...]", (*buffers,))
    copied, launches = sent * in_bytes + brought * out_bytes, 1.0 * sent + brought
    share, bucket_bytes = 1.0, mesh.axes[move.axis].bucket_bytes
    if sharing:
        larger = np.maximum(in_bytes, out_bytes)
        can = np.array([can_share(move, source) for source, _ in pairs])
        shares = (can & (larger < bucket_bytes).T).T
        part = sharing.latency_share(larger, bucket_bytes)
        share = cast("float", np.where(shares, part, share))
        is_cut = np.logical_and(move.kind == "all_gather", brought == 0)
        copied = copied + np.where(shares, in_bytes + np.where(is_cut, out_bytes, 0), 0)
        launches = launches + np.where(shares, share + is_cut, 0)
    copy_s = 2 * copied / (device.kernels.pointwise * device.memory_bytes_per_s)
    sent_s = collective_s(move.kind, in_bytes, out_bytes, mesh.axes[move.axis], share)
    launches = launches + (LAUNCHES_PER_COLLECTIVE * share if move.kind != "slice" else 1)
    both_s = sent_s + copy_s, launches * device.host_launch_s
    device_ns, host_ns = (_all_to_ns(np.asarray(each_s)) for each_s in both_s)
    return device_ns, host_ns


def sent(
    graph: Graph, node: Node, choice: Choice, mesh: Mesh, compute_ns: int
) -> tuple[tuple[Exchange, int], ...]:
    """The exchanges that an op of `compute_ns` sends while it runs, each with the nanoseconds by
    which it makes the op longer: those that do not hide behind the op's compute."""

    def ns(each: Exchange) -> int:
        whole = to_ns(collective_s(each.kind, each.in_bytes, each.out_bytes, mesh.axes[each.axis]))
        return max(0, whole - round(each.behind * compute_ns))

    collectives = exchanges(graph, node, choice, mesh.sizes)
    # A ring sends the same in each of its hops.
    priced = {each: ns(each) for each in dict.fromkeys(collectives)}
    return tuple((each, priced[each]) for each in collectives)
