"""The plan: every decision, what it is predicted to cost, and how good it is proven to be.

A plan is a value. As a file it is canonical JSON in three parts: `structure` (the decisions,
exact), `estimates` (integers, nanoseconds and bytes), `provenance` (versions and solver statistics,
never compared). A file is valid only if it is byte for byte the encoding of what it decodes to.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from math import prod
from typing import Annotated

import msgspec

from autopar.canonical import Format
from autopar.errors import PlanError
from autopar.graph import itemsize
from autopar.sharding import Sharding

SCHEMA_VERSION = 3
MAX_TENSOR_BYTES = 2**60

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A whole number of bytes, nanoseconds or things."""


class MeshAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One axis of the mesh, slowest first."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


def mesh_text(axes: Sequence[MeshAxis]) -> str:
    """`dp=2,tp=4`, as `meshes.parse_mesh` reads it; 1 for a mesh without axes."""
    return ",".join(f"{axis.name}={axis.size}" for axis in axes) or "1"


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a parameter lies (`storage`) and what is kept of it from forward to backward (`kept`,
    equal to `storage` when it is gathered again)."""

    shape: tuple[Count, ...]
    dtype: str
    storage: str
    kept: str


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decisions. `ops` maps a node's key to its choice (`strategy`), `outputs` the key of a
    detached output to its sharding, `routes` a group's key (`dataflow`) to the steps
    "[R, P] -> [R, S(0)]" that its tensor takes, `saved` the key of an activation
    (`dataflow.root_key`) to the sharding it is kept in for backward, where that is chosen."""

    model: str
    fingerprint: str
    cluster: str
    mesh: tuple[MeshAxis, ...]
    optimizer: str
    inputs: tuple[str, ...]
    params: dict[str, Param]
    ops: dict[str, str]
    outputs: dict[str, str]
    routes: dict[str, tuple[str, ...]]
    saved: dict[str, str] = {}
    replicated_unknown_ops: tuple[str, ...] = ()


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per device at the peak, by holder. `transient` is everything that is live at the peak
    and none of the others."""

    params: Count
    gradients: Count
    optimizer: Count
    kept: Count
    saved: Count
    transient: Count

    @property
    def total(self) -> int:
        return (
            self.params + self.gradients + self.optimizer + self.kept + self.saved + self.transient
        )


class CollectiveTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All collectives of one kind on one axis in a step: how many, local input bytes, time."""

    kind: str
    axis: str
    phase: str
    count: Count
    num_bytes: Count
    time_ns: Count


class OpTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All nodes of one key: how many there are, compute time of all, module pattern, op. A
    parameter's has the optimizer's time."""

    module: str
    op: str
    phase: str
    count: Count
    compute_ns: Count
    communication_ns: Count
    saved_bytes: Count
    optimizer_ns: Count


class Estimates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step is predicted to take on each device: forward and backward, what they send, and
    the optimizer; `flops` is what all devices compute together."""

    step_ns: Count
    compute_ns: Count
    communication_ns: Count
    optimizer_ns: Count
    flops: Count
    memory: Memory
    memory_limit: Count
    collectives: tuple[CollectiveTotal, ...]
    ops: dict[str, OpTotal]


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan came about. Never compared. `imposed` lists what the user asked for, and what a
    strategy comes to on the mesh of the plan (`constraints`)."""

    autopar: str
    torch: str
    solver: str
    status: str
    objective_ns: Count
    bound_ns: Count
    gap_ppm: Count
    meshes_tried: tuple[str, ...] = ()
    imposed: tuple[str, ...] = ()
    statistics: dict[str, str] = {}


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan; see the module's text."""

    schema: int
    structure: Structure
    estimates: Estimates
    provenance: Provenance

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, two-space indent, a final newline."""
        return _FORMAT.encode(self)

    @staticmethod
    def from_bytes(data: bytes, source: str = "plan") -> Plan:
        """The inverse of `to_bytes`; PlanError, naming the place, on anything else."""
        return _FORMAT.decode(data, source)

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together: mesh axes,
        parameters' shapes and dtypes, shardings."""
        names = [axis.name for axis in self.structure.mesh]
        if len(set(names)) != len(names) or len(names) > 8:
            raise ValueError(f"mesh axes {names}: names must differ, and there are at most 8")
        for name, param in self.structure.params.items():
            try:
                num_bytes = prod(param.shape) * itemsize(param.dtype)
            except KeyError:
                raise ValueError(f"parameter {name}: unknown dtype {param.dtype!r}") from None
            if num_bytes > MAX_TENSOR_BYTES:
                raise ValueError(f"parameter {name}: shape {list(param.shape)} is not plausible")
            for sharding in map(Sharding.parse, (param.storage, param.kept)):
                if len(sharding.placements) != len(names) or sharding.has_partial:
                    raise ValueError(f"parameter {name}: {sharding} on {len(names)} mesh axes")
                if any(p.dim >= len(param.shape) for p in sharding):
                    raise ValueError(f"parameter {name}: {sharding}, shape {list(param.shape)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old plan or the new one. PlanError if
        it cannot be written."""
        _FORMAT.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file; PlanError if it is missing, damaged or of another version."""
        return _FORMAT.load(path)

    @property
    def digest(self) -> str:
        """A hash of the decisions alone: equal for plans that do the same."""
        raw = msgspec.json.encode(self.structure, order="sorted")
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @property
    def world_size(self) -> int:
        size = 1
        for axis in self.structure.mesh:
            size *= axis.size
        return size


_FORMAT = Format(Plan, "plan", "plan again", SCHEMA_VERSION, PlanError)
