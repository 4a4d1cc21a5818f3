"""Who hands what to whom where a tensor goes from one mesh to another.

Each device of a mesh has a box of the tensor: of each of its parts, the elements from one to
another. What a device of the other mesh is to have is put together from what its box shares with
those of the first; of devices that have the same box, one sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.errors import PlanError
from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import chunk_index
from autopar.ir.sharding import Sharding

PieceBox = tuple[tuple[int, int], ...]
"""Per part of a tensor, in order of its slots, where a piece begins and ends."""


class OnMesh(NamedTuple):
    """How a tensor lies on a mesh."""

    mesh: Mesh
    sharding: Sharding

    def box(self, tensor: TensorType, atoms: Sequence[Atom], device: int) -> PieceBox:
        """What a device of the mesh has. PlanError if that is no box of the tensor's values."""
        if any(p.kind not in "RS" for p in self.sharding):
            raise PlanError(f"{self.sharding} is no way to hand a tensor on; plan again")
        found: list[tuple[int, int]] = []
        for slot, atom in tensor.slots():
            at, count = chunk_index(
                tensor, atoms, self.sharding, self.mesh.sizes, self.mesh.coordinate(device), slot
            )
            length = atoms[atom].size // count
            found.append((at * length, (at + 1) * length))
        return tuple(found)


class Parcel(NamedTuple):
    """The part of a tensor that a device of another mesh, `source`, hands to one."""

    source: int
    box: PieceBox


def holders(
    tensor: TensorType, atoms: Sequence[Atom], holding: OnMesh
) -> dict[PieceBox, list[int]]:
    """The devices of a mesh by what they have of a tensor."""
    found: dict[PieceBox, list[int]] = {}
    for device in range(holding.mesh.num_devices):
        found.setdefault(holding.box(tensor, atoms, device), []).append(device)
    return found


def parcels(
    held: Mapping[PieceBox, Sequence[int]], wanted: PieceBox, device: int
) -> tuple[Parcel, ...]:
    """All that `device` is handed, which is to have the box `wanted`: each element once.

    Of devices with the same box the one at the place of `device` among them sends, so that devices
    of equal meshes send to one each.
    """
    found: list[Parcel] = []
    for box, devices in held.items():
        shared = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(box, wanted, strict=True))
        if all(start < end for start, end in shared):
            sender = device if device in devices else devices[device % len(devices)]
            found.append(Parcel(sender, shared))
    return tuple(found)
