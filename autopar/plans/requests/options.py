"""The resolved options of a plan, beside the model and the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import AutoparError
from autopar.ir.mesh import MESH_OF_RANK, Device
from autopar.ir.pipeline import PipelineSchedule, is_action
from autopar.ir.sharding import Sharding
from autopar.plans.pipeline_orders import IN_CHUNKS, SCHEDULES
from autopar.plans.requests.constraints import (
    Constraint,
    PlacementSpec,
)
from autopar.plans.requests.matching import matches
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.policy import Policy, policy_now
from autopar.plans.structure import SavedDtype, Structure

BACKENDS = ("eager", "inductor")
"""What runs a rank's graphs: op by op, or compiled."""


AUTO = "auto"
"""The word for a mesh that the search chooses."""

SAVED_DTYPES: tuple[SavedDtype, ...] = ("", "bfloat16", "float16")
"""What activations of float32 may be saved in."""


STORED = "parameters as they are stored"
"""The origin of constraints of later calls of a model."""


def check_backend(backend: str | None) -> str:
    """`backend`, "" for None. AutoparError if there is no such backend."""
    if backend not in (None, "", *BACKENDS):
        raise AutoparError(f"no backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    return backend or ""


def default_backend(kind: str) -> str:
    """The default backend on devices of a kind ("cuda", "cpu")."""
    return "inductor" if kind == "cuda" else "eager"


@dataclass(frozen=True, slots=True)
class Options:
    """The options that are `given`, resolved. Fields of their own are for what a search narrows, or
    other calls of a model settle; `None` is an open number.

    `mesh` is a shape ("8x8", "dp=8,tp=8"), or one for each rank of a pipeline ("2x2/2/2"). "auto"
    is the best of all meshes with one or two axes and, from 64 devices on, of some with three.
    "auto:3" is the best of all with up to three. `memory_limit_bytes` defaults to the device's
    memory. `constraints` and `strategy` ("" for none) are imposed on the plan; the rest is planned
    around them.

    The batch is split into `microbatches`, None for as many as are best where memory binds. Losses
    are computed in `loss_chunks` of a rank's rows, None for 1, or more where that is better and
    memory binds. Parameters, with gradients and optimizer states, live where `residency` says, or,
    with `residency_if_needed`, as with "auto" if nothing fits otherwise. If `params_on_host` is not
    None, these live on the host already, and no others. Activations of float32 are saved in
    `saved_dtype`.

    The model is cut into `stages`, None for as many as are best, before the modules `cuts` if
    given. `schedule` is one of `pipeline_orders.SCHEDULES`, with a colon and its stages per rank if
    it is one of `IN_CHUNKS`, or "auto", or a table as text (`actions`).

    By default there is one stage. There are several if that does not fit in memory, or if it waits
    for communication above all (`stages_if_needed`).
    """

    given: PlanOptions = field(default_factory=PlanOptions)
    mesh: str = AUTO
    memory_limit_bytes: int | None = None
    constraints: tuple[Constraint, ...] = ()
    strategy: str = ""
    microbatches: int | None = None
    loss_chunks: int | None = None
    residency: str = "cuda"
    residency_if_needed: bool = False
    params_on_host: tuple[str, ...] | None = None
    saved_dtype: SavedDtype = ""
    stages: int | None = 1
    cuts: tuple[str, ...] = ()
    schedule: str = "auto"
    stages_if_needed: bool = False
    policy: Policy = field(default_factory=policy_now)
    """The thresholds of the search."""

    @property
    def time_limit_s(self) -> float | None:
        """For each solve, in seconds; None for no limit."""
        given = self.given.search.time_limit
        return None if given is None else float(given)

    @property
    def host_memory_bytes(self) -> int | None:
        """The memory of a node for all its devices, in equal shares; None for the cluster's
        figure."""
        given = self.given.memory.host
        return None if given is None else int(given)

    @property
    def actions(self) -> PipelineSchedule | None:
        """The pipeline schedule that `schedule` writes out, if it does."""
        return PipelineSchedule.parse(self.schedule) if is_written_out(self.schedule) else None

    @property
    def is_mesh_open(self) -> bool:
        """Whether the search chooses the mesh."""
        return self.mesh.startswith(AUTO)

    @property
    def rank_meshes(self) -> tuple[str, ...]:
        """The meshes of the ranks of a pipeline, if each has its own."""
        texts = self.mesh.split(MESH_OF_RANK)
        return tuple(texts) if len(texts) > 1 else ()

    @property
    def is_staged(self) -> bool:
        """Whether the plan may be a pipeline."""
        return self.stages != 1 or bool(self.cuts)

    @property
    def is_number_of_stages_open(self) -> bool:
        """Whether there may be one stage, or as many as are best."""
        return self.stages is None and not (
            self.cuts or self.rank_meshes or is_written_out(self.schedule)
        )

    def fuses(self, device: Device) -> bool:
        """Whether chains of pointwise ops are one kernel on `device`."""
        return (self.given.backend or default_backend(device.kind)) == "inductor"

    def wants_gradient(self, position: int, name: str) -> bool:
        """Whether an output has a gradient beside the losses."""
        return _is_named(self.given.outputs.differentiable, position, name)

    def leaves_out(self, position: int, name: str) -> bool:
        """Whether an output is None while the model trains."""
        return _is_named(self.given.outputs.unread, position, name)

    @property
    def imposed(self) -> tuple[str, ...]:
        """The constraints of the user, each once, as they were given."""
        origins = dict.fromkeys(constraint.origin for constraint in self.constraints)
        return (*origins, *([f"strategy {self.strategy}"] if self.strategy else []))

    def joined(self, other: Options) -> Options:
        """`other`, with the constraints and strategy of these options too."""
        constraints = (*other.constraints, *self.constraints)
        return replace(other, constraints=constraints, strategy=self.strategy)

    def in_stages_of(self, structure: Structure) -> Options:
        """The same for a later call of a model whose parameters are stored by the stages of
        `structure`; in one stage if it has one."""
        schedule = "\n".join(structure.schedule_rows) or structure.schedule
        cuts = tuple(stage.start for stage in structure.stages[1:])
        stages = len(structure.stages)
        return replace(self, stages=stages, cuts=cuts, schedule=schedule, stages_if_needed=False)

    def for_stored(
        self,
        mesh: str,
        storage: Mapping[str, Sharding],
        origin: str = STORED,
    ) -> Options:
        """The same with `mesh`, and with parameters as they are stored already as the only
        constraints."""
        constraints = tuple(
            Constraint("param", name, PlacementSpec(positional=sharding), origin)
            for name, sharding in storage.items()
        )
        return replace(
            self, mesh=mesh, constraints=constraints, strategy="", stages_if_needed=False
        )


def _is_named(patterns: Sequence[str], position: int, name: str) -> bool:
    return any(matches(p, name) or matches(p, str(position)) for p in patterns)


def is_named(schedule: str) -> bool:
    """Whether a schedule is given by its name, or left open."""
    name, colon, chunks = schedule.partition(":")
    if name in IN_CHUNKS and colon:
        return chunks.isdecimal() and int(chunks) > 0
    return schedule in ("auto", *SCHEDULES)


def is_written_out(schedule: str) -> bool:
    """Whether a schedule is given as a table."""
    first, *_ = schedule.replace(",", " ").split() or [""]
    return is_action(first)
