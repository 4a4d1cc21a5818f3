"""A pipeline in figures: its stages, the time and memory of each, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.graph import Phase
from autopar.ir.pipeline import PipelineSchedule
from autopar.ir.units import format_bytes, format_bytes_of, format_ns, format_percent, format_share
from autopar.plans.estimates import Memory, Shared
from autopar.plans.pipelines import SimulatedPipeline, memory_of_devices, simulate_pipeline
from autopar.plans.plan import Plan
from autopar.report.limits import SHORT
from autopar.report.names import stages_text
from autopar.report.printed import name
from autopar.report.printed import table as new_table
from autopar.report.waits import SimulatedRank, coloured, draw, exposed_ns, simulated_ranks

_STAGES = "Stages: forward and backward of one microbatch"
_DEVICES = "Memory of a device: what it holds at its peak for all of its stages"
_STEP = "Step: microbatches forward (digits) and backward (letters) through each rank"
_SPLIT = ", gradients of parameters in capitals"
_SENDS = (
    "Between stages, for each microbatch: bytes of a device, and how long they are under way; "
    "exposed is what receivers stand still for of that, in a step"
)
_SHARED = "At the end of a step: what ranks share once all microbatches are done, bytes of a device"


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage on its devices. It has at most `in_flight` microbatches at once, with `saved_bytes`
    of activations together. A device holds `memory_bytes` at its peak, for all stages of its rank.
    `idle` is the fraction of the step in which the rank of the stage waits. If backward is in two
    parts, `weights_ns` is the second."""

    stage: int
    start: str
    rank: int
    first_device: int
    num_devices: int
    mesh: str
    forward_ns: int
    backward_ns: int
    weights_ns: int
    idle: float
    in_flight: int
    saved_bytes: int
    memory_bytes: int
    memory_limit_bytes: int
    num_params: int

    @property
    def devices(self) -> str:
        """`4-7`, or `4`."""
        last = self.first_device + self.num_devices - 1
        return f"{self.first_device}" + (f"-{last}" if self.num_devices > 1 else "")


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank and its stages. It works for `busy_ns` of a step, and its messages at the end take
    `shared_ns`. It waits before its first action, between actions, and behind its optimizer's step.
    `memory` is the peak of a device of it, for all of its stages."""

    rank: int
    stages: tuple[int, ...]
    busy_ns: int
    shared_ns: int
    before_ns: int
    between_ns: int
    behind_ns: int
    memory: Memory
    memory_limit_bytes: int


@dataclass(frozen=True, slots=True)
class SendRow:
    """What stage `source` sends to `target` for each microbatch in one phase. In a step, the
    receiver waits `exposed_ns` while it is in flight."""

    source: int
    target: int
    phase: str
    num_bytes: int
    time_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class PipelineContent:
    """What a page says of all stages together. `picture` has a line per rank."""

    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    sends: tuple[SendRow, ...]
    shared: tuple[Shared, ...]
    binds: tuple[str, ...]
    picture: tuple[str, ...]
    is_split: bool

    @property
    def has_shared_ranks(self) -> bool:
        """Whether ranks have several stages."""
        return len(self.ranks) < len(self.stages)

    def sections(self) -> Iterator[tuple[str, RenderableType]]:
        """The tables and the picture, with their titles."""
        yield _STAGES, _stages(self)
        if self.has_shared_ranks:
            yield _DEVICES, _devices(self.ranks)
        yield _STEP + _SPLIT * self.is_split, Group(*map(coloured, self.picture))
        yield _SENDS, _sends(self.sends)
        yield _SHARED, _shared(self.shared)


def pipeline_content(plan: Plan) -> PipelineContent | None:
    """The content for all stages of a plan; None where there is one."""
    if not plan.structure.is_pipeline:
        return None
    estimates = plan.estimates
    table, simulated, ranks = simulated_plan(plan)
    rows = _stage_rows(plan, table, ranks)
    return PipelineContent(
        stages=rows,
        ranks=tuple(
            RankRow(
                *(k, r.stages, r.busy_ns, r.shared_ns, r.before_ns, r.between_ns, r.behind_ns),
                *(memory, estimates.memory_limit),
            )
            for k, (r, memory) in enumerate(
                zip(ranks, memory_of_devices(estimates, table), strict=True)
            )
        ),
        sends=_send_rows(plan, ranks),
        shared=estimates.shared,
        binds=(busiest_text(ranks, simulated.step_ns), _fullest_text(table, rows)),
        picture=draw(table, simulated.spans),
        is_split=table.is_split,
    )


def simulated_plan(
    plan: Plan,
) -> tuple[PipelineSchedule, SimulatedPipeline, tuple[SimulatedRank, ...]]:
    """The schedule of a plan in stages, and how it and its ranks are simulated."""
    table, estimates = plan.structure.actions, plan.estimates
    simulated = simulate_pipeline(table, estimates.stages, estimates.delays, estimates.shared)
    return table, simulated, simulated_ranks(table, simulated)


def _stage_rows(
    plan: Plan, actions: PipelineSchedule, ranks: Sequence[SimulatedRank]
) -> tuple[StageRow, ...]:
    step_ns = max(1, plan.estimates.step_ns)
    devices = memory_of_devices(plan.estimates, actions)
    pairs = zip(plan.structure.stages, plan.estimates.stages, strict=True)
    return tuple(
        StageRow(
            stage,
            each.start,
            actions.ranks[stage],
            each.first_rank,
            each.num_devices,
            each.mesh.text,
            own.microbatch.forward_ns,
            own.microbatch.backward_ns,
            own.microbatch.weights_ns,
            ranks[actions.ranks[stage]].waits_ns / step_ns,
            actions.in_flight(stage),
            own.memory.saved,
            devices[actions.ranks[stage]].total,
            plan.estimates.memory_limit,
            len(each.params),
        )
        for stage, (each, own) in enumerate(pairs)
    )


def _send_rows(plan: Plan, ranks: tuple[SimulatedRank, ...]) -> tuple[SendRow, ...]:
    exposed = exposed_ns(ranks)
    return tuple(
        SendRow(
            d.source,
            d.target,
            d.phase,
            d.num_bytes,
            d.time_ns,
            exposed.get((d.source, d.target, Phase(d.phase)), 0),
        )
        for d in plan.estimates.delays
    )


def busiest(ranks: Sequence[SimulatedRank]) -> int:
    """The rank that works longest; of several, the first."""
    return max(range(len(ranks)), key=lambda k: (ranks[k].busy_ns, -k))


def busiest_text(ranks: Sequence[SimulatedRank], step_ns: int) -> str:
    """A sentence on the rank that works longest, and on what it waits for."""
    rank = ranks[busiest(ranks)]
    waits = (
        (rank.before_ns, "until the first microbatch comes"),
        (rank.between_ns, "between its actions"),
        (rank.behind_ns, "for the others at the end"),
    )
    text = (
        f"the busiest rank, that of {stages_text(rank.stages)}, works for "
        f"{format_ns(rank.busy_ns)} of the step ({format_share(rank.busy_ns, step_ns)})"
    )
    if rank.shared_ns:
        text += f", shares results and gradients for {format_ns(rank.shared_ns)}"
    if not rank.waits_ns:
        return f"{text} and waits for nobody"
    words = ", ".join(f"{format_ns(ns)} {what}" for ns, what in waits if ns)
    return f"{text} and waits for {format_ns(rank.waits_ns)}: {words}"


def _fullest_text(actions: PipelineSchedule, rows: Sequence[StageRow]) -> str:
    row = max(rows, key=lambda each: (each.memory_bytes, -each.stage))
    short = "short" if row.memory_bytes >= SHORT * row.memory_limit_bytes else "not short"
    held = format_bytes_of(row.memory_bytes, row.memory_limit_bytes)
    stages = actions.stages_of(row.rank)
    what = "a device with " * (len(stages) > 1) + stages_text(stages)
    return f"memory is {short}: {what} holds most, at the peak {held}"


def _stages(summary: PipelineContent) -> RenderableType:
    weights = ("weights",) * summary.is_split
    columns = ("params", "forward", "backward", *weights, "idle", "in flight", "memory")
    return new_table(
        ("stage", "begins with", "devices", "mesh"),
        columns,
        (
            (
                str(row.stage),
                name(row.start or "(first)"),
                row.devices,
                name(row.mesh),
                str(row.num_params),
                format_ns(row.forward_ns),
                format_ns(row.backward_ns),
                *[format_ns(row.weights_ns)] * summary.is_split,
                format_percent(row.idle),
                str(row.in_flight),
                format_bytes(row.memory_bytes),
            )
            for row in summary.stages
        ),
    )


def _devices(ranks: tuple[RankRow, ...]) -> RenderableType:
    return new_table(
        ("rank", "stages"),
        ("always there", "saved", "temporary", "memory", "of the limit"),
        (
            (
                str(row.rank),
                ", ".join(map(str, row.stages)),
                format_bytes(row.memory.at_rest),
                format_bytes(row.memory.unsharded + row.memory.saved),
                format_bytes(row.memory.transient),
                format_bytes(row.memory.total),
                format_share(row.memory.total, row.memory_limit_bytes),
            )
            for row in ranks
        ),
    )


def _sends(sends: tuple[SendRow, ...]) -> RenderableType:
    if not sends:
        return Text("none")
    return new_table(
        ("from", "to", "phase"),
        ("bytes", "time", "exposed"),
        (
            (
                str(each.source),
                str(each.target),
                each.phase,
                format_bytes(each.num_bytes),
                format_ns(each.time_ns),
                format_ns(each.exposed_ns),
            )
            for each in sends
        ),
    )


def _shared(shared: tuple[Shared, ...]) -> RenderableType:
    if not shared:
        return Text("nothing")
    return new_table(
        ("what", "ranks"),
        ("messages", "bytes", "time"),
        (
            (
                each.kind,
                each.places,
                str(each.count),
                format_bytes(each.num_bytes),
                format_ns(each.time_ns),
            )
            for each in shared
        ),
    )
