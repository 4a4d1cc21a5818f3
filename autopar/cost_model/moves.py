"""What one step of a redistribution costs on one rank: the collective, and the copies that lay its
buffers out."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.buckets import BUCKET_BYTES, Sharing, can_share
from autopar.chunking import is_padded
from autopar.cost_model.collectives import collective_s
from autopar.exchange import Exchange, exchanges
from autopar.graph import Atom, Graph, Node, TensorType
from autopar.mesh import Device, Mesh
from autopar.reshard import Collective, buffer_bytes, local_part_sizes
from autopar.sharding import Placement, Sharding

NS = 1e9


def to_ns(seconds: float) -> int:
    """Whole nanoseconds, rounded: prices are integers so that sums can be checked exactly."""
    return round(seconds * NS)


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
) -> int:
    """Nanoseconds of `move` = step(source, target) of one tensor.

    Collectives work on the leading dim: a gather along one behind others, of which a rank has more
    than one row, copies its output into place, a scatter its input, an exchange both. A slice
    copies what it keeps. Chunks that are uneven are copied to be padded; those of another than the
    leading dim are copied on both sides. What shares a bucket (`sharing` is not None) bears a part
    of its latency and is copied into it, a gather out of it too; chunks travel alone.
    """
    in_bytes, out_bytes = buffer_bytes(tensor, atoms, source, target, move, mesh.sizes)
    copied = 0
    gathers = move.source.kind == "S"
    after = source if move.kind == "all_gather" else target
    in_place = gathers and _lead(tensor, atoms, after, move.source, mesh) == 1
    if move.kind == "slice":
        copied = out_bytes
    elif move.chunks:
        inner = any(p.dim > 0 for p in (move.source, move.target) if p.kind == "C")
        if inner or is_padded(tensor, source, target, mesh.sizes):
            copied += in_bytes
        if inner:
            copied += out_bytes
    else:
        if gathers and not in_place:
            copied += out_bytes
        if move.target.kind == "S" and _lead(tensor, atoms, source, move.target, mesh) > 1:
            copied += in_bytes
    share = 1.0
    larger = max(in_bytes, out_bytes)
    if sharing and can_share(move, source) and larger < BUCKET_BYTES:
        share = sharing.latency_share(larger)
        copied += in_bytes
        if move.kind == "all_gather" and in_place:
            copied += out_bytes
    copy_s = 2 * copied / device.memory_bytes_per_s
    sent_s = collective_s(move.kind, in_bytes, out_bytes, mesh.axes[move.axis], share)
    return to_ns(sent_s + copy_s)


def sent(
    graph: Graph, node: Node, choice: str, mesh: Mesh, compute_ns: int
) -> tuple[tuple[Exchange, int], ...]:
    """What an op of `compute_ns` sends while it runs, with the nanoseconds of each by which the op
    takes longer: what does not hide behind the compute that runs meanwhile."""

    def ns(each: Exchange) -> int:
        axis = mesh.axes[each.axis]
        whole = to_ns(collective_s(each.kind, each.in_bytes, each.out_bytes, axis))
        return max(0, whole - round(each.behind * compute_ns))

    return tuple((each, ns(each)) for each in exchanges(graph, node, choice, mesh.sizes))


def _lead(
    tensor: TensorType, atoms: Sequence[Atom], state: Sharding, placement: Placement, mesh: Mesh
) -> int:
    """How many pieces a rank in `state` has along all that stands before the part that `placement`
    shards: with more than one, those of a rank are not contiguous in the whole."""
    found = 1
    for dim, parts in enumerate(local_part_sizes(tensor, atoms, state, mesh.sizes)):
        for part, size in enumerate(parts):
            if (dim, part) == placement.slot:
                return found
            found *= size
    return found
