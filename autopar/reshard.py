"""Moving a tensor from one sharding to another: the one list of collectives that is priced and
emitted.

A *state* is a sharding the tensor can be in. A `Collective` changes the placement on one mesh axis.
Two axes on one atom nest: the outer one cuts it first, and only the innermost may be added or
removed, so that every rank holds one contiguous piece of the atom at all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.graph import Atom, Slot, TensorType, itemsize
from autopar.sharding import P, Placement, R, S, Sharding

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice")


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """One step on mesh axis `axis`: `source` placement there becomes `target`. `slice` is local."""

    kind: str
    axis: int
    source: Placement
    target: Placement

    def __str__(self) -> str:
        return f"{self.kind}@{self.axis} {self.source}->{self.target}"


def nesting(atom: Atom, axes: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes that shard `atom`, outermost first.

    Atoms of parameters are cut by the fastest axis (the last) first: a gather over the slow axis
    then moves the pieces that are already small. Other atoms (batch, sequence) are cut by the
    slowest axis first, so that the fast one can be exchanged while the slow one stays.
    """
    return tuple(sorted(axes, reverse=atom.in_param))


def is_legal(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> bool:
    """Whether every sharded part divides evenly by the axes on it, and exists."""
    ways: dict[Slot, int] = {}
    for axis, placement in enumerate(sharding):
        if placement.kind == "S":
            ways[placement.slot] = ways.get(placement.slot, 1) * sizes[axis]
    table = dict(tensor.slots())
    return all(slot in table and atoms[table[slot]].size % n == 0 for slot, n in ways.items())


def local_part_sizes(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Per dim, the sizes of its parts on one rank. The sharding must be legal."""
    return tuple(
        tuple(
            atoms[atom].size // prod(sizes[k] for k in sharding.axes_on((dim, part)))
            for part, atom in enumerate(parts)
        )
        for dim, parts in enumerate(tensor.parts)
    )


def local_shape(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape of one rank's piece. The sharding must be legal."""
    return tuple(map(prod, local_part_sizes(tensor, atoms, sharding, sizes)))


def local_bytes(
    tensor: TensorType, atoms: Sequence[Atom], sharding: Sharding, sizes: Sequence[int]
) -> int:
    """Bytes of one rank's piece. The sharding must be legal."""
    return prod(local_shape(tensor, atoms, sharding, sizes)) * itemsize(tensor.dtype)


def placements(
    tensor: TensorType, atoms: Sequence[Atom], size: int, *, partial: bool
) -> tuple[Placement, ...]:
    """What one axis of `size` ranks can be, on its own, in canonical order: R, shards, P."""
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
    changed = [k for k, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    (axis,) = changed
    for sharding in (source, target):
        placement = sharding[axis]
        if placement.kind == "S":
            atom = atoms[tensor.parts[placement.dim][placement.part]]
            if nesting(atom, sharding.axes_on(placement.slot))[-1] != axis:
                return None
    return collective(axis, source[axis], target[axis])


def chunk_index(
    tensor: TensorType,
    atoms: Sequence[Atom],
    sharding: Sharding,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    slot: Slot,
) -> tuple[int, int]:
    """(index, count): which of how many equal pieces of `slot` the rank at `coordinate` has."""
    atom = atoms[tensor.parts[slot[0]][slot[1]]]
    index, count = 0, 1
    for axis in nesting(atom, sharding.axes_on(slot)):
        index, count = index * sizes[axis] + coordinate[axis], count * sizes[axis]
    return index, count
