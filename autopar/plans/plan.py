"""The plan: every decision, what it is predicted to cost, and how good it is proven to be.

A plan is a value. As a file it is canonical JSON in three parts: `structure` (the decisions,
exact), `estimates` (integers, nanoseconds and bytes), `provenance` (versions and solver statistics,
never compared). A file is valid only if it is byte for byte the encoding of what it decodes to; in
it, identical parameters share an entry (`patterns`).
"""

from __future__ import annotations

import hashlib
import os
from math import prod
from typing import Annotated, Any, Literal

import msgspec

from autopar.errors import PlanError, StageError
from autopar.ir.canonical import Format, Wire
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import itemsize
from autopar.ir.mesh import BUCKET_BYTES, Axis, Mesh
from autopar.ir.pipeline import ActionTable
from autopar.ir.sharding import Sharding
from autopar.plans.cluster_rates import Count
from autopar.plans.display import Shown
from autopar.plans.estimates import Estimates
from autopar.plans.order import OPTIMIZER, Item
from autopar.plans.pipeline_orders import IN_CHUNKS, make_table
from autopar.plans.plan_options import PlanOptions
from autopar.plans.wire import pack, unpack

SCHEMA_VERSION = 12
MAX_TENSOR_BYTES = 2**60
MAX_ITEMS = 2_000_000
"""Ops and redistributions of a step."""


class MeshAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One axis of the mesh, slowest first, and how much its buckets hold."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSOR_BYTES)] = BUCKET_BYTES


Residency = Literal["device", "host", "external"]
"""Whose memory holds a tensor: the device's that computes with it, or its host's; of one that is
the script's own, the device's."""


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a parameter lies with its gradient and the optimizer's states (`storage`, in the memory
    of `residency`) and what is kept of it from forward to backward (`kept`, equal to `storage` when
    it is gathered again)."""

    shape: tuple[Count, ...]
    dtype: str
    storage: str
    kept: str
    residency: Residency = "device"

    @property
    def type_text(self) -> str:
        """`bfloat16[4096, 4096]`, as types are written elsewhere in a plan."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def choice(self) -> ParamChoice:
        """All of it. ValueError if what should be a sharding is none."""
        states = Sharding.parse(self.storage), Sharding.parse(self.kept)
        return ParamChoice(*states, int(self.residency == "host"))

    @property
    def num_bytes(self) -> int:
        """Of all of it, in the whole model. KeyError if the dtype is unknown."""
        return prod(self.shape) * itemsize(self.dtype)


class PipelineSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """In which order the ranks of a pipeline work on the microbatches of a step: by the name of a
    schedule (`pipeline_orders`) with its stages per rank, or as the rows of a `table`; `none`
    where there is one stage. Losses are worked on in `loss_chunks` of a rank's rows
    (`ir.loss_chunks`). The backward of a stage comes in two parts if it `is_split`
    (`ir.backward_parts`)."""

    kind: str = "none"
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    chunks: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    table: tuple[str, ...] = ()
    loss_chunks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    is_split: bool = False

    @property
    def name(self) -> str:
        """As an option has it, but for a table: `1f1b`, `interleaved:2`."""
        return f"{self.kind}:{self.chunks}" if self.kind in IN_CHUNKS else self.kind

    def made(self, ranks: int) -> ActionTable:
        """What each of so many ranks of a pipeline does. ValueError if there is no such table."""
        try:
            if self.table:
                return ActionTable.parse("\n".join(self.table))
            return make_table(self.kind, ranks, self.microbatches, self.chunks)
        except StageError as error:
            raise ValueError(f"schedule: {error}") from error


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a pipeline: it begins with the module `start`, on the ranks from `first_rank`
    on, under the decisions `structure`."""

    start: str
    first_rank: Count
    structure: Structure


SavedDtype = Literal["", "bfloat16", "float16"]
"""What activations of float32 are saved in for backward, "" for what they are."""


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decisions. `ops` maps a node's key to its choice (`choices`), `outputs` the key of a
    detached output to its sharding, `routes` a group's key (`uses`) to the steps
    "[R, P] -> [R, S(0)]" that its tensor takes, `saved` the key of an activation
    (`uses.root_key`) to the sharding it is kept in for backward, where that is chosen. `again` are
    the keys of ops that backward makes again (`ir.again`), whose copies are among `ops`;
    `offloaded` those of activations (`uses.root_key`) that forward hands over in the host's memory
    (`ir.offloading`). `reload_pace` says how fast they come back (`host_copies.pace`). What is
    saved is rounded to `saved_dtype` (`ir.rounding`).

    In a pipeline the decisions are those of the `stages`, and the mesh is the line they form."""

    model: str
    fingerprint: str
    cluster: str
    axes: tuple[MeshAxis, ...] = msgspec.field(name="mesh")
    optimizer: str
    inputs: tuple[str, ...]
    params: dict[str, Param]
    ops: dict[str, str]
    outputs: dict[str, str]
    routes: dict[str, tuple[str, ...]]
    saved: dict[str, str] = {}
    again: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    reload_pace: Count = 0
    saved_dtype: SavedDtype = ""
    replicated_unknown_ops: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    schedule: PipelineSchedule = PipelineSchedule()

    @property
    def parts(self) -> tuple[Structure, ...]:
        """The decisions for each stage; itself where there is one."""
        return tuple(stage.structure for stage in self.stages) or (self,)

    @property
    def num_ranks(self) -> int:
        """How many ranks a pipeline has, each of the devices of a stage."""
        return len({stage.first_rank for stage in self.stages})

    @property
    def rank_meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each rank of a pipeline; the one there is where it is none."""
        if not self.stages:
            return (self.mesh,)
        ranks = self.schedule.made(self.num_ranks).ranks
        meshes = {ranks[k]: stage.structure.mesh for k, stage in enumerate(self.stages)}
        return tuple(meshes[rank] for rank in sorted(meshes))

    @property
    def num_devices(self) -> int:
        """How many devices the plan is for."""
        stages = {stage.first_rank: stage.structure for stage in self.stages}
        return sum(s.num_devices for s in stages.values()) or self.mesh.num_devices

    @property
    def mesh(self) -> Mesh:
        """Where the plan lies; of a pipeline, the line of its stages."""
        return Mesh(tuple(Axis(a.name, a.size, bucket_bytes=a.bucket_bytes) for a in self.axes))


FRAGILE = 0.005
"""A plan that is better than those of another structure by less than this part of its step is
fragile: what they are is decided by trifles, or by errors of the cost model."""


PROVEN = 0.001
"""A plan whose gap is at most this part of its step is as good as optimal: to close the last of it
takes long where resources share a window, and prices are not that exact."""


class Margin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the best plan of another structure (`weight_layouts`) takes: `bound_ns` what none of
    them beats, `step_ns` the step of the best one known (None if none is), and `rival` what it does
    otherwise. They are steps as modelled (`Estimates.modelled_ns`), not differences."""

    bound_ns: Count
    step_ns: Count | None
    rival: str


IN_STAGES = "in_stages"
"""What `Provenance.statistics` has of stages that were looked for and not chosen."""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan came about. Never compared. `imposed` lists what the user asked for, and what a
    strategy comes to on the mesh of the plan (`constraints`); `margin` is None where it was not
    asked for. `options` are all that was asked, to plan again; plans of before have none."""

    autopar: str
    torch: str
    solver: str
    status: str
    objective_ns: Count
    bound_ns: Count
    gap_ppm: Count
    meshes_tried: tuple[str, ...] = ()
    imposed: tuple[str, ...] = ()
    margin: Margin | None = None
    statistics: dict[str, str] = {}
    options: PlanOptions | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_proven(self) -> bool:
        """Whether no plan is known to be possible that is better by more than `PROVEN`."""
        return self.gap_ppm <= PROVEN * 1e6

    @property
    def is_fragile(self) -> bool | None:
        """Whether a plan of another structure is within `FRAGILE` of this one; None if unknown."""
        margin = self.margin
        most = self.objective_ns * (1 + FRAGILE)
        if margin is None:
            return None
        if margin.step_ns is not None and margin.step_ns < most:
            return True
        return None if margin.bound_ns < most else False


class Plan(msgspec.Struct, Shown, frozen=True, forbid_unknown_fields=True):
    """A plan; see the module's text."""

    schema: int
    structure: Structure
    estimates: Estimates
    provenance: Provenance

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, one line per entry of a field, a final newline."""
        return _FORMAT.encode(self)

    @staticmethod
    def from_bytes(data: bytes, source: str = "plan") -> Plan:
        """The inverse of `to_bytes`; PlanError, naming the place, on anything else."""
        return _FORMAT.decode(data, source)

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together: mesh axes,
        parameters' shapes and dtypes, shardings, stages."""
        _check_structure(self.structure)
        _check_timeline(self.estimates)
        if self.structure.stages:
            self._check_stages()

    def _check_stages(self) -> None:
        structure = self.structure
        if len(structure.stages) * structure.schedule.microbatches > MAX_ITEMS:
            raise ValueError(f"schedule: a step has at most {MAX_ITEMS} items")
        table = structure.schedule.made(structure.num_ranks)
        if len(structure.stages) != len(self.estimates.stages):
            raise ValueError(
                f"stages: {len(structure.stages)} are decided, {len(self.estimates.stages)} priced"
            )
        if table.num_stages != len(structure.stages):
            raise ValueError(
                f"stages: there are {len(structure.stages)}, the schedule has {table.num_stages}"
            )
        _check_table(structure, table)
        if len(self.estimates.devices) not in (0, structure.num_ranks):
            raise ValueError(f"devices: {len(self.estimates.devices)} of {structure.num_ranks}")
        for each in self.estimates.shared:
            if not each.ranks or max(each.ranks) >= structure.num_ranks:
                raise ValueError(f"shared: {each.kind} of ranks {list(each.ranks)}")
        for stage, estimates in zip(structure.stages, self.estimates.stages, strict=True):
            if estimates.stages:
                raise ValueError(f"stages: what begins with {stage.start!r} has stages itself")
            _check_structure(stage.structure)
            _check_timeline(estimates)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old plan or the new one. PlanError if
        it cannot be written."""
        _FORMAT.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file; PlanError if it is missing, damaged or of another version."""
        return _FORMAT.load(path)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (2020-12) of plan files of this version; the package has it as
        `plan.schema.json`. It says what fields there are: files must be canonical beside that."""
        schema = msgspec.json.schema(Plan)
        for noun in schema["$defs"].values():
            noun["description"] = " ".join(noun["description"].split())
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"autopar plan, version {SCHEMA_VERSION}",
            **schema,
        }

    @property
    def digest(self) -> str:
        """A hash of the decisions alone: equal for plans that do the same."""
        raw = msgspec.json.encode(self.structure, order="sorted")
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @property
    def world_size(self) -> int:
        return self.structure.num_devices

    @property
    def stages(self) -> tuple[Plan, ...]:
        """The stages of a pipeline, each as a plan of its own."""
        pairs = zip(self.structure.stages, self.estimates.stages, strict=True)
        return tuple(Plan(self.schema, s.structure, e, self.provenance) for s, e in pairs)


def _check_table(structure: Structure, table: ActionTable) -> None:
    """ValueError if what ranks do is of other microbatches, ranks or parts of backward than the
    stages are planned for."""
    count = structure.schedule.microbatches
    if table.microbatches != count:
        raise ValueError(f"schedule: of {table.microbatches} microbatches, where there are {count}")
    on: dict[int, tuple[int, tuple[int, ...]]] = {}
    for k, stage in enumerate(structure.stages):
        here = stage.first_rank, stage.structure.mesh.sizes
        if on.setdefault(table.ranks[k], here) != here:
            raise ValueError(
                f"schedule: stage {k} is on rank {table.ranks[k]}, and not on its devices"
            )
        if stage.structure.schedule.is_split != table.is_split:
            how = "two parts" if table.is_split else "one part"
            raise ValueError(f"schedule: backward comes in {how}, and otherwise in stage {k}")
    devices = [d for first, sizes in on.values() for d in range(first, first + prod(sizes))]
    if sorted(devices) != [*range(len(devices))]:
        raise ValueError("schedule: stages of different ranks are on the same devices")


def _check_structure(structure: Structure) -> None:
    names = [axis.name for axis in structure.axes]
    if len(set(names)) != len(names) or len(names) > 8:
        raise ValueError(f"mesh axes {names}: names must differ, and there are at most 8")
    for name, param in structure.params.items():
        try:
            num_bytes = param.num_bytes
        except KeyError:
            raise ValueError(f"parameter {name}: unknown dtype {param.dtype!r}") from None
        if num_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"parameter {name}: shape {list(param.shape)} is not plausible")
        for sharding in (param.choice.storage, param.choice.kept):
            if len(sharding.placements) != len(names) or sharding.has_partial:
                raise ValueError(f"parameter {name}: {sharding} on {len(names)} mesh axes")
            if any(p.dim >= len(param.shape) for p in sharding):
                raise ValueError(f"parameter {name}: {sharding}, shape {list(param.shape)}")


def _check_timeline(estimates: Estimates) -> None:
    curve = estimates.memory_curve
    steps = {key: len(found) for key, found in estimates.sends.items()}
    for text in {text for run in estimates.runs for text in run.items}:
        item = None if text in estimates.ops or text == OPTIMIZER else Item.parse(text)
        if item is not None and item.step >= steps.get(item.key, 0):
            raise ValueError(f"order: {text} is neither an op nor sent")
    if sum(run.times * len(run.items) for run in estimates.runs) > MAX_ITEMS:
        raise ValueError(f"order: a step has at most {MAX_ITEMS} items")
    lengths = {len(curve.time_ns), len(curve.kept), len(curve.saved), len(curve.transient)}
    if len(lengths) > 1:
        raise ValueError("memory_curve: its lists must be equally long")


_FORMAT = Format(Plan, "plan", "plan again", SCHEMA_VERSION, PlanError, Wire(3, pack, unpack))
