"""Moving a tensor from one sharding to another: the one list of collectives that is priced and
emitted.

A *state* is a sharding the tensor can be in. A `Collective` changes the placement on one mesh axis.
Two axes on one atom nest: the outer one cuts it first. Only the innermost may be added or removed,
so that every rank holds one contiguous range of the atom at all times. A dim that is cut into
uneven chunks (`uneven`) is joined, from the innermost chunks on, before anything else is done with
it; a gradient is cut in the opposite order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from autopar.errors import PlanError
from autopar.ir.graph import Atom, Slot, TensorType, itemsize
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import P, Placement, R, S, Sharding
from autopar.ir.uneven import chunk_length, chunked_axes, chunked_dim, fits, is_padded, largest

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "slice")
_CHUNK_STEPS = ({"C", "R"}, {"C", "P"})


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """One step on mesh axis `axis`: `source` placement there becomes `target`. `slice` is local."""

    kind: str
    axis: int
    source: Placement
    target: Placement

    @property
    def chunks(self) -> bool:
        """Whether the collective joins or cuts chunks that may be uneven."""
        return "C" in (self.source.kind, self.target.kind)

    def __str__(self) -> str:
        return f"{self.kind}@{self.axis} {self.source}->{self.target}"


def nesting(atom: Atom, axes: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes that shard `atom`, outermost first.

    Atoms of parameters are cut by the fastest axis (the last) first: a gather over the slow axis
    then moves shards that are already small. Other atoms (batch, sequence) are cut by the slowest
    axis first, so that the fast one can be exchanged while the slow one stays.
    """
    return tuple(sorted(axes, reverse=atom.in_param))


def is_legal(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> bool:
    """Whether every sharded part exists and divides evenly by the axes on it. In a dim that is cut
    into chunks, all other cuts must come before the chunks (`uneven.fits`)."""
    num_parts: dict[Slot, int] = {}
    for axis, placement in enumerate(sharding):
        if placement.kind == "S":
            num_parts[placement.slot] = num_parts.get(placement.slot, 1) * sizes[axis]
    for (dim, part), n in num_parts.items():
        parts = tensor.parts[dim] if dim < len(tensor.parts) else ()
        if part >= len(parts) or atoms[parts[part]].size % n:
            return False
    return fits(tensor, sharding)


def local_part_sizes(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Per dim, the sizes of its parts on one rank, before any cut into chunks. The sharding must be
    legal."""
    num_parts: dict[Slot, int] = {}
    for placement, size in zip(sharding, sizes, strict=True):
        if placement.kind == "S":
            num_parts[placement.slot] = num_parts.get(placement.slot, 1) * size
    return tuple(
        tuple(atoms[atom].size // num_parts.get((dim, part), 1) for part, atom in enumerate(parts))
        for dim, parts in enumerate(tensor.parts)
    )


def local_shape(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape of one rank's shard; of uneven chunks, that of the largest. The sharding must be
    legal."""
    shape = tuple(map(prod, local_part_sizes(tensor, atoms, sharding, sizes)))
    dim = chunked_dim(sharding)
    if dim is None:
        return shape
    rows = largest(shape[dim], (sizes[k] for k in chunked_axes(sharding)))
    return (*shape[:dim], rows, *shape[dim + 1 :])


def local_bytes(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> int:
    """Bytes of one rank's shard, the largest if they differ. The sharding must be legal."""
    num_parts = 1
    for placement, size in zip(sharding, sizes, strict=True):
        if placement.kind == "C":
            return prod(local_shape(tensor, atoms, sharding, sizes)) * itemsize(tensor.dtype)
        if placement.kind == "S":
            num_parts *= size
    return tensor.num_bytes // num_parts


def placements(
    tensor: TensorType, atoms: Sequence[Atom], size: int, *, partial: bool
) -> tuple[Placement, ...]:
    """The possible placements on one axis of `size` ranks, in canonical order: R, shards, P."""
    shards = (S(*slot) for slot, atom in tensor.slots() if atoms[atom].size % size == 0)
    return (R, *shards, P) if partial else (R, *shards)


def states(
    tensor: TensorType, atoms: Sequence[Atom], sizes: Sequence[int], *, partial: bool
) -> tuple[Sharding, ...]:
    """Every legal sharding of `tensor` over axes of `sizes`, in canonical order."""
    per_axis = (placements(tensor, atoms, size, partial=partial) for size in sizes)
    candidates = (Sharding(combination) for combination in product(*per_axis))
    return tuple(s for s in candidates if is_legal(tensor, atoms, s, sizes))


def collective(axis: int, source: Placement, target: Placement) -> Collective | None:
    """The step that turns `source` into `target` on one axis; None where there is none."""
    if source == target or target == P:
        return None
    if "C" in (source.kind, target.kind) and {source.kind, target.kind} not in _CHUNK_STEPS:
        return None
    if source == P:
        kind = "all_reduce" if target == R else "reduce_scatter"
    elif source == R:
        kind = "slice"
    else:
        kind = "all_gather" if target == R else "all_to_all"
    return Collective(kind, axis, source, target)


def step(
    tensor: TensorType,
    atoms: Sequence[Atom],
    source: Sharding,
    target: Sharding,
) -> Collective | None:
    """The single collective from `source` to `target`, two legal states that differ on one axis;
    None if they differ on several, or if the axis is not innermost where it shards."""
    pairs = zip(source, target, strict=True)
    changed = [k for k, (a, b) in enumerate(pairs) if a != b]
    if len(changed) != 1:
        return None
    (axis,) = changed
    if not _leaves_chunks_alone(source, target, axis):
        return None
    for sharding in (source, target):
        placement = sharding[axis]
        if placement.kind == "S":
            atom = atoms[tensor.parts[placement.dim][placement.part]]
            if nesting(atom, sharding.axes_on(placement.slot))[-1] != axis:
                return None
    return collective(axis, source[axis], target[axis])


def _leaves_chunks_alone(source: Sharding, target: Sharding, axis: int) -> bool:
    """Whether a change on `axis` touches no chunks but the innermost. Ranks hold chunks of
    different sizes: these can only be joined, cut, or summed as they are."""
    for sharding in (source, target):
        chunks = chunked_axes(sharding)
        if sharding[axis].kind == "C" and chunks[-1] != axis:
            return False
        if chunks and "C" not in (source[axis].kind, target[axis].kind):
            return (source[axis], target[axis]) == (P, R)
    return True


def buffer_bytes(
    tensor: TensorType,
    atoms: Sequence[Atom],
    source: Sharding,
    target: Sharding,
    move: Collective,
    sizes: Sequence[int],
) -> tuple[int, int]:
    """(bytes given, bytes got) by one rank in `move` = step(source, target), the most of any rank.
    Chunks travel padded to equal length."""
    given, got = (local_bytes(tensor, atoms, state, sizes) for state in (source, target))
    if not move.chunks or move.kind == "slice":
        return given, got
    gathers = move.kind == "all_gather"
    joined, dim = (target, move.source.dim) if gathers else (source, move.target.dim)
    rows, num_parts = local_shape(tensor, atoms, joined, sizes)[dim], sizes[move.axis]
    chunk = (got if gathers else given) // rows * chunk_length(rows, num_parts)
    return (chunk, num_parts * chunk) if gathers else (num_parts * chunk, chunk)


def chunk_index(
    tensor: TensorType,
    atoms: Sequence[Atom],
    sharding: Sharding,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    slot: Slot,
) -> tuple[int, int]:
    """(index, count): of `count` equal shards of `slot`, the rank at `coordinate` has `index`."""
    atom = atoms[tensor.parts[slot[0]][slot[1]]]
    index, count = 0, 1
    for axis in nesting(atom, sharding.axes_on(slot)):
        index, count = index * sizes[axis] + coordinate[axis], count * sizes[axis]
    return index, count


class Copies(NamedTuple):
    """Whether a step copies what it sends, and what it brings, to lay its buffers out. Both are
    arrays for many tensors at once, whose sizes of atoms are arrays."""

    sent: bool
    brought: bool


def layout_copies(
    tensor: TensorType,
    atoms: Sequence[Atom],
    source: Sharding,
    target: Sharding,
    move: Collective,
    sizes: Sequence[int],
) -> Copies:
    """The copies of `move` = step(source, target).

    Collectives work on the leading dim. Along another dim, with more than one row on a rank before
    it, a gather copies its output into place, a scatter its input, an exchange both. A slice copies
    its result. Uneven chunks are copied to be padded; those of another than the leading dim are
    copied on both sides.
    """
    if move.kind == "slice":
        return Copies(sent=False, brought=True)
    if move.chunks:
        inner = any(p.dim > 0 for p in (move.source, move.target) if p.kind == "C")
        return Copies(inner or is_padded(tensor, source, target, sizes), inner)
    sent = brought = False
    if move.source.kind == "S":
        after = source if move.kind == "all_gather" else target
        brought = _lead(tensor, atoms, after, move.source, sizes) > 1
    if move.target.kind == "S":
        sent = _lead(tensor, atoms, source, move.target, sizes) > 1
    return Copies(sent, brought)


def _lead(
    tensor: TensorType,
    atoms: Sequence[Atom],
    state: Sharding,
    placement: Placement,
    sizes: Sequence[int],
) -> int:
    """The number of rows that a rank in `state` has before the part that `placement` shards. With
    more than one, the rank's elements are not contiguous in the whole tensor."""
    count = 1
    for dim, parts in enumerate(local_part_sizes(tensor, atoms, state, sizes)):
        for part, size in enumerate(parts):
            if (dim, part) == placement.slot:
                return count
            count *= size
    return count


# Which device sends what to which where a tensor goes from one mesh to another.
#
# Each device of a mesh has a box of the tensor: a range of each of the tensor's parts. A device of
# the other mesh puts its own box together from the intersections with the boxes of the first mesh.
# Of several devices with the same box, one sends it.

ShardBox = tuple[tuple[int, int], ...]
"""Per part of a tensor, in order of its slots, where a box begins and ends."""


class OnMesh(NamedTuple):
    """How a tensor lies on a mesh."""

    mesh: Mesh
    sharding: Sharding

    def box(self, tensor: TensorType, atoms: Sequence[Atom], device: int) -> ShardBox:
        """The box of a device of the mesh. PlanError for a tensor that is partial or in chunks,
        which has no such boxes."""
        if any(p.kind not in "RS" for p in self.sharding):
            raise PlanError(f"{self.sharding} is no way to hand a tensor on; plan again")
        bounds: list[tuple[int, int]] = []
        for slot, atom in tensor.slots():
            at, count = chunk_index(
                tensor, atoms, self.sharding, self.mesh.sizes, self.mesh.coordinate(device), slot
            )
            length = atoms[atom].size // count
            bounds.append((at * length, (at + 1) * length))
        return tuple(bounds)


class ShardPiece(NamedTuple):
    """The part of a tensor, `box`, that the device `source` of another mesh sends to a device."""

    source: int
    box: ShardBox


def holders(
    tensor: TensorType, atoms: Sequence[Atom], holding: OnMesh
) -> dict[ShardBox, list[int]]:
    """The devices of a mesh by their box of a tensor."""
    devices = range(holding.mesh.num_devices)
    return grouped((holding.box(tensor, atoms, device), device) for device in devices)


def shard_pieces(
    held: Mapping[ShardBox, Sequence[int]], target: ShardBox, device: int
) -> tuple[ShardPiece, ...]:
    """All that is sent to `device`, which is to have the box `target`: each element once.

    Of several devices with the same box, the sender is the one in the same place as `device`. So
    devices of equal meshes send to one device each.
    """
    parts: list[ShardPiece] = []
    for box, devices in held.items():
        shared = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(box, target, strict=True))
        if all(start < end for start, end in shared):
            sender = device if device in devices else devices[device % len(devices)]
            parts.append(ShardPiece(sender, shared))
    return tuple(parts)
