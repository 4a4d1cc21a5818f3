"""The decisions of a plan: those of each of its stages, and the pipeline schedule."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

import msgspec

from autopar.errors import StageError
from autopar.ir.choices import ParamChoice
from autopar.ir.graph import itemsize
from autopar.ir.mesh import BUCKET_BYTES, Axis, Mesh, meshes_text
from autopar.ir.pipeline import PipelineSchedule
from autopar.ir.sharding import Sharding
from autopar.plans.cluster_rates import Count
from autopar.plans.pipeline_orders import ONE_AFTER_THE_OTHER, named_schedule

MAX_TENSOR_BYTES = 2**60
MAX_ITEMS = 2_000_000
"""Ops and redistributions of a step."""


class MeshAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One axis of the mesh, slowest first, and how much its buckets hold."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSOR_BYTES)] = BUCKET_BYTES


Residency = Literal["cuda", "cpu", "external"]
"""Whose memory holds a tensor: that of the device that computes with it (`cuda`), or of its host
(`cpu`). An `external` one, which is the script's own, is on the device."""


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a parameter is stored. `storage` is the sharding of it, its gradient and its optimizer
    states, in the memory of `residency`. `for_backward` is its sharding from forward to backward,
    equal to `storage` if backward gathers it anew."""

    shape: tuple[Count, ...]
    dtype: str
    storage: str
    for_backward: str
    residency: Residency = "cuda"

    @property
    def type_text(self) -> str:
        """`bfloat16[4096, 4096]`, as types are written elsewhere in a plan."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def choice(self) -> ParamChoice:
        """The same, parsed. ValueError if what should be a sharding is none."""
        states = Sharding.parse(self.storage), Sharding.parse(self.for_backward)
        return ParamChoice(*states, int(self.residency == "cpu"))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter. KeyError if the dtype is unknown."""
        return prod(self.shape) * itemsize(self.dtype)


SavedDtype = Literal["", "bfloat16", "float16"]
"""The dtype in which float32 activations are saved for backward; "" if in their own."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The decisions for one stage. It begins with the module `start` ("" for the first), on the
    ranks from `first_rank` on. Its step is in `microbatches`, with losses in `loss_chunks` chunks
    of a rank's rows (`ir.passes.loss_chunks`). Its backward is in two parts if it `is_split`
    (`ir.passes.stages`).

    `ops` maps a node's key to its choice (`choices`), and `outputs` the key of a detached output to
    its sharding. `routes` maps a group's key (`uses`) to the steps "[R, P] -> [R, S(0)]" that its
    tensor takes. `saved` maps the key of an activation (`uses.root_key`) to the sharding in which
    it is saved for backward, if that is chosen. `recompute` are the keys of ops that backward
    recomputes (`ir.passes.recompute`); their copies are among `ops`. `offloaded` are the keys of
    activations (`uses.root_key`) that wait for backward in the host's memory (`ir.offloading`).
    `reload_pace` says how fast they come back (`host_copies.pace`). Saved activations are rounded
    to `saved_dtype` (`ir.passes.rounding`).
    """

    axes: tuple[MeshAxis, ...] = msgspec.field(name="mesh")
    params: dict[str, Param]
    ops: dict[str, str]
    outputs: dict[str, str]
    routes: dict[str, tuple[str, ...]]
    saved: dict[str, str] = {}
    recompute: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    reload_pace: Count = 0
    saved_dtype: SavedDtype = ""
    replicated_unknown_ops: tuple[str, ...] = ()
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    loss_chunks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    is_split: bool = False
    start: str = ""
    first_rank: Count = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of the stage."""
        return Mesh(tuple(Axis(a.name, a.size, bucket_bytes=a.bucket_bytes) for a in self.axes))

    @property
    def num_devices(self) -> int:
        """How many devices it is on."""
        return prod(axis.size for axis in self.axes)


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All decisions: those of each of the `stages`, of which a plan without a pipeline has one, and
    the pipeline schedule. `schedule` is its name (`pipeline_orders`), with the stages per rank as
    in `interleaved:2`. `schedule_rows` is its table, if it has no name."""

    model: str
    fingerprint: str
    cluster: str
    optimizer: str
    inputs: tuple[str, ...]
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1)]
    schedule: str = ONE_AFTER_THE_OTHER
    schedule_rows: tuple[str, ...] = ()

    @property
    def is_pipeline(self) -> bool:
        """Whether there are several stages."""
        return len(self.stages) > 1

    @property
    def only(self) -> Stage:
        """The stage of a plan that has one."""
        (stage,) = self.stages
        return stage

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return self.stages[0].microbatches

    @property
    def loss_chunks(self) -> int:
        """The largest number of loss chunks of a stage."""
        return max(stage.loss_chunks for stage in self.stages)

    @property
    def params(self) -> dict[str, Param]:
        """The parameters of all stages; a tied one is as in the last of its stages."""
        return {name: param for stage in self.stages for name, param in stage.params.items()}

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has, each with the devices of its stages."""
        return len({stage.first_rank for stage in self.stages})

    @property
    def actions(self) -> PipelineSchedule:
        """The schedule as a table. ValueError if there is no such table."""
        try:
            if self.schedule_rows:
                return PipelineSchedule.parse("\n".join(self.schedule_rows))
            return named_schedule(self.schedule, self.num_ranks, self.microbatches)
        except StageError as error:
            raise ValueError(f"schedule: {error}") from error

    @property
    def rank_meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each rank."""
        if self.num_ranks == 1:
            return (self.stages[0].mesh,)
        ranks = self.actions.ranks
        meshes = {ranks[k]: stage.mesh for k, stage in enumerate(self.stages)}
        return tuple(meshes[rank] for rank in sorted(meshes))

    @property
    def num_devices(self) -> int:
        """How many devices the plan is for."""
        return sum({stage.first_rank: stage.num_devices for stage in self.stages}.values())

    @property
    def mesh_text(self) -> str:
        """The mesh of all ranks, or the mesh of each, as the option `mesh` has it."""
        return meshes_text(self.rank_meshes)

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together: mesh axes,
        parameters' shapes and dtypes, shardings, stages."""
        if len(self.stages) * self.microbatches > MAX_ITEMS:
            raise ValueError(f"schedule: a step has at most {MAX_ITEMS} items")
        for each in self.stages:
            _check_stage(each)
        _check_schedule(self)


def _check_schedule(structure: Structure) -> None:
    """ValueError if the schedule has other stages, microbatches, ranks or parts of backward than
    the plan."""
    first, count = structure.stages[0], structure.microbatches
    is_usual = structure.schedule == ONE_AFTER_THE_OTHER and not structure.schedule_rows
    if is_usual and len(structure.stages) == 1:
        # Its table would take seconds to lay out for as many microbatches as a file may say.
        if first.first_rank or first.is_split:
            raise ValueError("schedule: one stage begins with the first rank, its backward whole")
        return
    table = structure.actions
    if table.num_stages != len(structure.stages):
        raise ValueError(
            f"stages: there are {len(structure.stages)}, the schedule has {table.num_stages}"
        )
    if table.microbatches != count:
        raise ValueError(f"schedule: of {table.microbatches} microbatches, where there are {count}")
    places: dict[int, tuple[int, tuple[int, ...]]] = {}
    for k, stage in enumerate(structure.stages):
        place = stage.first_rank, stage.mesh.sizes
        if places.setdefault(table.ranks[k], place) != place:
            raise ValueError(
                f"schedule: stage {k} is on rank {table.ranks[k]}, and not on its devices"
            )
        if stage.microbatches != count:
            raise ValueError(f"schedule: stage {k} is in {stage.microbatches} microbatches")
        if stage.is_split != table.is_split:
            how = "two parts" if table.is_split else "one part"
            raise ValueError(f"schedule: backward comes in {how}, and otherwise in stage {k}")
    devices = [d for first, sizes in places.values() for d in range(first, first + prod(sizes))]
    if sorted(devices) != [*range(len(devices))]:
        raise ValueError("schedule: stages of different ranks are on the same devices")


def _check_stage(stage: Stage) -> None:
    names = [axis.name for axis in stage.axes]
    if len(set(names)) != len(names) or len(names) > 8:
        raise ValueError(f"mesh axes {names}: names must differ, and there are at most 8")
    for name, param in stage.params.items():
        try:
            num_bytes = param.num_bytes
        except KeyError:
            raise ValueError(f"parameter {name}: unknown dtype {param.dtype!r}") from None
        if num_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"parameter {name}: shape {list(param.shape)} is not plausible")
        for sharding in (param.choice.storage, param.choice.for_backward):
            if len(sharding) != len(names) or sharding.has_partial:
                raise ValueError(f"parameter {name}: {sharding} on {len(names)} mesh axes")
            if any(p.dim >= len(param.shape) for p in sharding):
                raise ValueError(f"parameter {name}: {sharding}, shape {list(param.shape)}")
