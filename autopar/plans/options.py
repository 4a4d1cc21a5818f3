"""What a user can ask of the planner, beside the model and the cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from numbers import Real
from typing import Any

from autopar.cluster.mesh_shapes import MeshLike, read_mesh
from autopar.errors import ArgumentError, AutoparError, StageError
from autopar.ir.files import read_at_most
from autopar.ir.mesh import MESH_OF_RANK, Device
from autopar.ir.pipeline import ActionTable, is_action
from autopar.ir.sharding import Sharding
from autopar.ir.units import parse_bytes, parse_seconds
from autopar.plans.constraints import (
    Constraint,
    Forbidden,
    Pins,
    WantedPlacement,
    check_strategy,
    parse_forbidden,
    parse_pins,
)
from autopar.plans.matching import matches
from autopar.plans.pipeline_orders import IN_CHUNKS, SCHEDULES
from autopar.plans.plan import SavedDtype, Structure

BACKENDS = ("eager", "inductor")
"""What runs a rank's graphs: op by op, or compiled."""


AUTO = "auto"
"""The word for a mesh that is to be found."""

RESIDENCIES = ("cuda", "cpu", "auto")
"""Where parameters live: on the device that computes, on its host, or where it is best if memory
binds."""

CHECKPOINTS = ("planned", "as written")
"""What becomes of regions that a model wraps in `torch.utils.checkpoint`: what is saved of them is
free to be planned, or nothing is."""

SAVED_DTYPES: tuple[SavedDtype, ...] = ("", "bfloat16", "float16")
"""What activations of float32 may be saved in."""


STORED = "parameters as they are stored"
"""The origin of what calls of a model ask for that are not the first."""

_MAX_TABLE_BYTES = 2**24
"""Of the file that a table of actions is in."""


def check_backend(backend: str | None) -> str:
    """`backend`, "" for None. AutoparError if there is no such backend."""
    if backend not in (None, "", *BACKENDS):
        raise AutoparError(f"no backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    return backend or ""


def default_backend(kind: str) -> str:
    """What runs graphs on devices of a kind ("cuda", "cpu") where nobody says."""
    return "inductor" if kind == "cuda" else "eager"


@dataclass(frozen=True, slots=True)
class Options:
    """`mesh` is a shape ("8x8", "dp=8,tp=8"), of a pipeline one for all its ranks or one for each
    ("2x2/2/2"), or "auto" for the best of all with one or two axes and, from 64 devices on, of
    those with three that promise something, "auto:3" of all with up to three.
    `optimizer` is what `cost_model.optimizer_kinds.find_optimizers` reads ("adamw", "sgd-momentum",
    "muon; adamw for head.weight"): its step
    counts, and what it keeps per parameter counts against the memory limit, which defaults to the
    device's memory; `host_memory_bytes` is what a node has for all its devices, in equal shares, by
    default what the cluster says.
    `strict` turns the warning about an op without a rule into an error.
    `constraints` and `strategy` ("" for none) are what is imposed on the plan; the rest is planned
    around it. `differentiable_outputs` names the outputs, as the
    model's user does or by their position, that have a gradient beside the losses; "*" stands for
    any text; `unread_outputs` in the same way those that are None while the model trains.
    `backend`, one of `BACKENDS` or "" for the device's own, decides what is priced.
    The batch is worked on in `microbatches`, None for as many as are best where memory binds, and
    losses in `loss_chunks` of a rank's rows, None for 1, or more where that is better and memory
    binds.
    Parameters, with what belongs to them, live where `residency`, one of `RESIDENCIES`, says;
    those that are `hosted` do already, if that is not None, and only they. What backward makes
    again is `planned`, or what the model wraps in checkpoints ("as written"). What is saved of
    float32 is rounded to `saved_dtype`, one of `SAVED_DTYPES`.
    The model is cut into `stages`, None for as many as are best, before the modules `cuts` if those
    are given; they work on microbatches as `schedule` says: one of
    `pipeline_orders.SCHEDULES`, with a colon and its stages per rank if it is one of `IN_CHUNKS`,
    "auto", or a table as text (`table`). Where nobody has said how many there are to be, there is
    one microbatch, and one stage, unless that does not fit in memory (`microbatches_if_needed`,
    `stages_if_needed`); there are several stages too if one waits for communication above all.
    """

    mesh: str = AUTO
    optimizer: str = "adamw"
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    strict: bool = False
    constraints: tuple[Constraint, ...] = ()
    strategy: str = ""
    differentiable_outputs: tuple[str, ...] = ()
    backend: str = ""
    microbatches: int | None = 1
    loss_chunks: int | None = None
    residency: str = "cuda"
    hosted: tuple[str, ...] | None = None
    checkpoint: str = "planned"
    stages: int | None = 1
    cuts: tuple[str, ...] = ()
    schedule: str = "auto"
    unread_outputs: tuple[str, ...] = ()
    saved_dtype: SavedDtype = ""
    microbatches_if_needed: bool = False
    stages_if_needed: bool = False
    host_memory_bytes: int | None = None

    @property
    def table(self) -> ActionTable | None:
        """The table of actions that `schedule` is, if it is one."""
        return ActionTable.parse(self.schedule) if is_table(self.schedule) else None

    @property
    def is_mesh_open(self) -> bool:
        """Whether the mesh is for the search to choose."""
        return self.mesh.startswith(AUTO)

    @property
    def rank_meshes(self) -> tuple[str, ...]:
        """The meshes of the ranks of a pipeline, where each is given its own."""
        texts = self.mesh.split(MESH_OF_RANK)
        return tuple(texts) if len(texts) > 1 else ()

    @property
    def is_staged(self) -> bool:
        """Whether the plan may be a pipeline."""
        return self.stages != 1 or bool(self.cuts)

    def fuses(self, device: Device) -> bool:
        """Whether chains of pointwise ops are one kernel on `device`."""
        return (self.backend or default_backend(device.kind)) == "inductor"

    def wants_gradient(self, position: int, name: str) -> bool:
        """Whether an output is among the `differentiable_outputs`."""
        return _is_named(self.differentiable_outputs, position, name)

    def leaves_out(self, position: int, name: str) -> bool:
        """Whether an output is among the `unread_outputs`."""
        return _is_named(self.unread_outputs, position, name)

    @property
    def asked(self) -> tuple[str, ...]:
        """What the user imposes, each as it was written, once."""
        origins = dict.fromkeys(constraint.origin for constraint in self.constraints)
        return (*origins, *([f"strategy {self.strategy}"] if self.strategy else []))

    def joined(self, other: Options) -> Options:
        """`other`, with what is imposed here as well."""
        constraints = (*other.constraints, *self.constraints)
        return replace(other, constraints=constraints, strategy=self.strategy)

    def in_stages_of(self, structure: Structure) -> Options:
        """The same for another call of a model whose parameters lie as the stages of `structure`,
        the plan of an earlier one, have them; in one stage if it has one. Where nobody asked for
        stages, nobody said how many microbatches they have."""
        if not structure.stages:
            return replace(self, stages=1, cuts=(), schedule="auto", stages_if_needed=False)
        made = structure.schedule
        schedule = "\n".join(made.table) or made.name
        cuts = tuple(stage.start for stage in structure.stages[1:])
        count = None if self.stages_if_needed else self.microbatches
        return replace(
            self, stages=len(structure.stages), cuts=cuts, schedule=schedule, microbatches=count,
            stages_if_needed=False,
        )  # fmt: skip

    def for_stored(
        self,
        mesh: str,
        storage: Mapping[str, Sharding],
        origin: str = STORED,
    ) -> Options:
        """Nothing imposed but `mesh`, and parameters as they are stored already."""
        constraints = tuple(
            Constraint("param", name, WantedPlacement(positional=sharding), origin)
            for name, sharding in storage.items()
        )
        return replace(
            self, mesh=mesh, constraints=constraints, strategy="", stages_if_needed=False
        )


def _is_named(patterns: Sequence[str], position: int, name: str) -> bool:
    return any(matches(p, name) or matches(p, str(position)) for p in patterns)


def make_options(
    mesh: MeshLike,
    optimizer: str,
    memory_limit: float | str | None,
    time_limit: float | str | None,
    strict: Any,
    pins: Pins = (),
    forbid: Forbidden = (),
    strategy: str | None = "",
    differentiable_outputs: str | Sequence[str] = (),
    backend: str | None = None,
    microbatches: int | str | None = 1,
    residency: str = "cuda",
    checkpoint: str = "planned",
    stages: int | str | None = 1,
    cuts: str | Sequence[str] = (),
    schedule: str | os.PathLike[str] = "auto",
    loss_chunks: int | str = "auto",
    unread_outputs: str | Sequence[str] = (),
    saved_dtype: object = None,
    host_memory: float | str | None = None,
) -> Options:
    """Options from what users write: `mesh` as `mesh_shapes` reads it, `memory_limit` and
    `host_memory` in bytes, or as text such as "72GiB", `time_limit` in seconds, or as "2min";
    `pins` and `forbid` as `constraints` reads them; `microbatches` as a number or "auto", None for
    "auto" in stages and for 1 elsewhere; `residency` one of `RESIDENCIES`, `checkpoint` one of
    `CHECKPOINTS`; `stages` as a number or "auto", None for 1, or more if that waits and no mesh,
    number of microbatches or constraint is given; `cuts` as a module or several, `schedule` by
    its name, or a table or the path of one, which settles `stages` and `microbatches`;
    `loss_chunks` as a number or "auto"; `unread_outputs` as a name or several; `saved_dtype` as
    torch names it, None for that of what is saved. AutoparError on what cannot be read."""
    axes, constraints = read_mesh(mesh), (*parse_pins(pins), *parse_forbidden(forbid))
    num_stages = _count("stages", _usual_stages(axes) if stages is None else stages)
    if MESH_OF_RANK in axes and num_stages == 1 and not cuts:
        raise ArgumentError(f"mesh={axes!r}: that is of a pipeline, and stages={stages!r}")
    usual = "auto" if num_stages != 1 or cuts else 1
    limit = _quantity("memory_limit", memory_limit, parse_bytes, "bytes", "72GiB")
    of_node = _quantity("host_memory", host_memory, parse_bytes, "bytes", "1.5TiB")
    if not isinstance(strict, bool):
        raise ArgumentError(f"strict={strict!r}: write True or False")
    cut_before, order = _several(cuts), read_schedule(schedule)
    if cut_before and num_stages not in (None, 1, len(cut_before) + 1):
        raise ArgumentError(
            f"stages={num_stages}: cuts before {', '.join(cut_before)} make {len(cut_before) + 1}; "
            "give all cuts, or none and only how many stages"
        )
    count = _count("microbatches", usual if microbatches is None else microbatches)
    is_free = axes == "auto" and microbatches in (None, "auto") and not (constraints or strategy)
    if is_table(order):
        num_stages, count = _as_in(ActionTable.parse(order), num_stages, microbatches, cut_before)
    elif order != "auto" and num_stages == 1 and not cuts:
        raise ArgumentError(f"schedule={order!r}: that is of stages; say how many, or auto")
    return Options(
        mesh=axes,
        optimizer=optimizer,
        memory_limit_bytes=None if limit is None else int(limit),
        time_limit_s=_quantity("time_limit", time_limit, parse_seconds, "seconds", "2min"),
        strict=strict,
        constraints=constraints,
        strategy=check_strategy(strategy),
        differentiable_outputs=_several(differentiable_outputs),
        backend=check_backend(backend),
        microbatches=count,
        residency=_one_of("residency", residency, RESIDENCIES),
        checkpoint=_one_of("checkpoint", checkpoint, CHECKPOINTS),
        stages=num_stages,
        cuts=cut_before,
        schedule=order,
        loss_chunks=_count("loss_chunks", loss_chunks),
        unread_outputs=_several(unread_outputs),
        saved_dtype=check_saved_dtype(saved_dtype),
        microbatches_if_needed=microbatches is None and count == 1,
        stages_if_needed=stages is None and not cuts and order == "auto" and is_free,
        host_memory_bytes=None if of_node is None else int(of_node),
    )


def _usual_stages(mesh: str) -> int | str:
    """How many stages there are where nobody says."""
    return "auto" if MESH_OF_RANK in mesh else 1


def _several(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def check_saved_dtype(given: object) -> SavedDtype:
    """`given`, which may be one of torch's dtypes, "" for None. ArgumentError unless it is one of
    `SAVED_DTYPES`."""
    name = "" if given is None else str(given).removeprefix("torch.")
    for known in SAVED_DTYPES:
        if name == known:
            return known
    words = " or ".join(filter(None, SAVED_DTYPES))
    raise ArgumentError(f"saved_dtype={given!r}: write {words}, or nothing")


def _one_of(name: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ArgumentError(f"{name}={given!r}: write one of {', '.join(known)}")
    return given


def is_named(schedule: str) -> bool:
    """Whether an order of microbatches is asked for by its name, or left open."""
    name, colon, chunks = schedule.partition(":")
    if name in IN_CHUNKS and colon:
        return chunks.isdecimal() and int(chunks) > 0
    return schedule in ("auto", *SCHEDULES)


def is_table(schedule: str) -> bool:
    """Whether what is asked for is a table of actions."""
    first, *_ = schedule.replace(",", " ").split() or [""]
    return is_action(first)


def read_schedule(given: str | os.PathLike[str]) -> str:
    """The name of a schedule, or a table as text: `given`, or what is in the file `given`.
    ArgumentError if it is none of them, or no table that ranks can follow."""
    text = os.fspath(given)
    if is_named(text):
        return text
    if not is_table(text):
        text = _schedule_file(text)
    try:
        return str(ActionTable.parse(text))
    except StageError as error:
        raise ArgumentError(f"schedule: {error}") from None


def _schedule_file(path: str) -> str:
    """The text in a file."""
    try:
        return read_at_most(path, _MAX_TABLE_BYTES).decode()
    except (OSError, ValueError) as error:
        words = ", ".join(SCHEDULES)
        raise ArgumentError(
            f'schedule={path!r}: write "auto", one of {words} ("interleaved:2", "zb:2"), a '
            f'table such as "0F0 0B0", or the path of one ({error})'
        ) from None


def _as_in(
    table: ActionTable, stages: int | None, microbatches: int | str | None, cuts: Sequence[str]
) -> tuple[int, int]:
    """How many stages and microbatches there are, which the user may have said as well."""
    num_stages, count = table.num_stages, table.microbatches
    if num_stages == 1:
        raise ArgumentError("schedule: the table has one stage, which is no pipeline")
    asked = None if microbatches is None else _count("microbatches", microbatches)
    if asked not in (None, count):
        raise ArgumentError(f"microbatches={asked}: the table has {count}; leave it out")
    if stages not in (None, 1, num_stages):
        raise ArgumentError(f"stages={stages}: the table has {num_stages}; leave it out")
    if cuts and len(cuts) + 1 != num_stages:
        raise ArgumentError(f"{len(cuts) + 1} stages are cut: the table has {num_stages}")
    return num_stages, count


def _count(name: str, given: int | str) -> int | None:
    """How many; None for "auto"."""
    if given == "auto":
        return None
    is_number = isinstance(given, str) and given.isascii() and given.isdecimal()
    count = int(given) if is_number else given
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f'{name}={given!r}: write a number, or "auto"')
    return count


def _quantity(
    name: str,
    given: Any,
    parse: Callable[[str], float],
    unit: str,
    example: str,
) -> float | None:
    """The number in `given`; None where there is no limit."""
    try:
        value = parse(given) if isinstance(given, str) else given
    except ValueError as error:
        raise AutoparError(f"{name}: {error}") from error
    if value is None or value == inf:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f'{name}={given!r}: write {unit}, or text such as "{example}"')
    number = float(value)
    if not (isfinite(number) and number > 0):
        raise AutoparError(f"{name}={given!r}: it must be more than 0 {unit}")
    return number
