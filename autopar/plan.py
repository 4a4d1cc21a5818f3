"""The plan: every decision, what it is predicted to cost, and how good it is proven to be.

A plan is a value. As a file it is canonical JSON in three parts: `structure` (the decisions, exact),
`estimates` (integers, nanoseconds and bytes), `provenance` (versions and solver statistics, never
compared). A file is valid only if it is byte for byte the encoding of what it decodes to.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from autopar.errors import PlanError

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 64 << 20


class MeshAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One axis of the mesh, slowest first."""

    name: str
    size: int


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a parameter lies (`storage`) and what is kept of it from forward to backward (`kept`,
    equal to `storage` when it is gathered again)."""

    shape: tuple[int, ...]
    dtype: str
    storage: str
    kept: str


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decisions. `ops` maps a node's key to its choice (`strategy`), `outputs` the key of a
    detached output to its sharding, `routes` a group's key (`dataflow`) to the steps
    "[R, P] -> [R, S(0)]" that its tensor takes."""

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
    replicated_unknown_ops: tuple[str, ...] = ()


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per device at the peak, by holder. `transient` is everything that is live at the peak
    and none of the others."""

    params: int
    gradients: int
    optimizer: int
    kept: int
    saved: int
    transient: int

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
    count: int
    num_bytes: int
    time_ns: int


class OpTotal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All nodes of one key: how many there are, compute time of all, module pattern, op."""

    module: str
    op: str
    phase: str
    count: int
    compute_ns: int
    communication_ns: int
    saved_bytes: int


class Estimates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step is predicted to take on each device."""

    step_ns: int
    compute_ns: int
    communication_ns: int
    flops: int
    memory: Memory
    memory_limit: int
    collectives: tuple[CollectiveTotal, ...]
    ops: dict[str, OpTotal]


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan came about. Never compared."""

    autopar: str
    torch: str
    solver: str
    status: str
    objective_ns: int
    bound_ns: int
    gap_ppm: int
    meshes_tried: tuple[str, ...] = ()
    statistics: dict[str, str] = {}


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan; see the module's text."""

    schema: int
    structure: Structure
    estimates: Estimates
    provenance: Provenance

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, two-space indent, a final newline."""
        raw = msgspec.json.encode(self, order="sorted")
        return msgspec.json.format(raw, indent=2) + b"\n"

    @staticmethod
    def from_bytes(data: bytes, source: str = "plan") -> Plan:
        """The inverse of `to_bytes`; PlanError, naming the place, on anything else."""
        if len(data) > MAX_FILE_BYTES:
            raise PlanError(f"{source}: {len(data)} bytes; a plan has at most {MAX_FILE_BYTES}")
        try:
            plan = msgspec.json.decode(data, type=Plan)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PlanError(f"{source}: not a plan: {error}") from None
        if plan.schema != SCHEMA_VERSION:
            raise PlanError(
                f"{source}: schema version {plan.schema}, this autopar reads {SCHEMA_VERSION}; "
                "plan again with this version"
            )
        if plan.to_bytes() != data:
            raise PlanError(
                f"{source}: not in canonical form (edited by hand, or damaged); plan again, "
                "or load and save it with the autopar that made it"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old plan or the new one."""
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file; PlanError if it is missing, damaged or of another version."""
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise PlanError(f"cannot read plan {os.fspath(path)}: {error.strerror}") from None
        return Plan.from_bytes(data, os.fspath(path))

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
