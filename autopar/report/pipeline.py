"""What a person wants to know of a pipeline: its stages, what each takes and holds, and who waits
for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from autopar.ir.pipeline import Action, ActionSpan, ActionTable, Pass
from autopar.ir.units import format_bytes, format_bytes_of, format_ns, format_percent
from autopar.plans.estimates import Delay
from autopar.plans.pipelines import play_pipeline
from autopar.plans.plan import Plan
from autopar.report.printed import Printed, name, section
from autopar.report.printed import table as new_table

COLUMNS = 72
"""Columns of the picture of a step."""

MAX_RANKS = 32
"""Rows of it."""

_STYLES = {Pass.FORWARD: "blue", Pass.BACKWARD: "green", Pass.WEIGHTS: "yellow"}
_MARKS = {Pass.FORWARD: "0123456789", Pass.BACKWARD: "abcdefghij", Pass.WEIGHTS: "ABCDEFGHIJ"}
"""What stands for an action: the last digit of its microbatch, as a letter on the way back."""

_STAGES = "Stages: forward and backward of one microbatch"
_STEP = "Step: microbatches forward (digits) and backward (letters) through each rank"
_SPLIT = ", gradients of parameters in capitals"
_SENDS = "Between stages, for each microbatch: bytes of a device, and how long they are under way"


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage on its devices. `in_flight` microbatches are held at most at once; of the step the
    rank of the stage is `idle`, a fraction. Of a backward in two parts, `weights_ns` is the
    second."""

    stage: int
    start: str
    rank: int
    first_device: int
    mesh: str
    forward_ns: int
    backward_ns: int
    weights_ns: int
    idle: float
    in_flight: int
    memory_bytes: int
    num_params: int


@dataclass(frozen=True, slots=True)
class PipelineSummary(Printed):
    """The content of the page of a pipeline. `picture` has a line per rank."""

    model: str
    cluster: str
    world_size: int
    optimizer: str
    inputs: tuple[str, ...]
    schedule: str
    microbatches: int
    step_ns: int
    bubble: float
    tokens_per_s: int
    utilisation: float
    memory_bytes: int
    memory_limit_bytes: int
    stages: tuple[StageRow, ...]
    sends: tuple[Delay, ...]
    picture: tuple[str, ...]
    is_split: bool
    imposed: tuple[str, ...]
    digest: str

    def page(self) -> RenderableType:
        sections: list[RenderableType] = [_head(self)]
        for title, content in (
            (_STAGES, _stages(self)),
            (_STEP + _SPLIT * self.is_split, Group(*map(_drawn, self.picture))),
            (_SENDS, _sends(self.sends)),
        ):
            sections += section(title, content)
        return Group(*sections)


def summarize_pipeline(plan: Plan) -> PipelineSummary:
    """The summary of a plan in stages."""
    structure, estimates, provenance = plan.structure, plan.estimates, plan.provenance
    table = structure.schedule.made(structure.num_ranks)
    played = play_pipeline(table, estimates.stages, estimates.delays)
    step_ns = max(1, estimates.step_ns)
    busy = [
        sum(played.spans[action].end - played.spans[action].start for action in row)
        for row in table.rows
    ]
    rows = tuple(
        StageRow(
            stage,
            each.start,
            table.ranks[stage],
            each.first_rank,
            each.structure.mesh.text,
            own.turn.forward_ns,
            own.turn.backward_ns,
            own.turn.weights_ns,
            1 - busy[table.ranks[stage]] / step_ns,
            table.in_flight(stage),
            own.memory.total,
            len(each.structure.params),
        )
        for stage, (each, own) in enumerate(zip(structure.stages, estimates.stages, strict=True))
    )
    return PipelineSummary(
        model=structure.model,
        cluster=structure.cluster,
        world_size=plan.world_size,
        optimizer=structure.optimizer,
        inputs=structure.inputs,
        schedule=structure.schedule.kind,
        microbatches=structure.schedule.microbatches,
        step_ns=estimates.step_ns,
        bubble=estimates.bubble_ns / step_ns,
        tokens_per_s=estimates.tokens_per_s,
        utilisation=estimates.mfu_ppm / 1e6,
        memory_bytes=estimates.memory.total,
        memory_limit_bytes=estimates.memory_limit,
        stages=rows,
        sends=estimates.delays,
        picture=draw(table, played.spans),
        is_split=table.is_split,
        imposed=provenance.imposed,
        digest=plan.digest,
    )


def draw(
    table: ActionTable, spans: Mapping[Action, ActionSpan], width: int = COLUMNS
) -> tuple[str, ...]:
    """A line per rank, in which each column is an equal part of the time until the last action is
    over: what is done in the middle of it."""
    end = max(span.end for span in spans.values())
    lines: list[str] = []
    for row in table.rows[:MAX_RANKS]:
        line = [" "] * width
        for action in row:
            span = spans[action]
            for column in range(span.start * width // end, -(-span.end * width // end)):
                middle = (2 * column + 1) * end
                if 2 * width * span.start <= middle < 2 * width * span.end:
                    line[column] = _MARKS[action.kind][action.microbatch % 10]
        lines.append("".join(line))
    return tuple(lines)


def _drawn(line: str) -> Text:
    """A line of the picture, in colours."""
    kinds = {mark: kind for kind, marks in _MARKS.items() for mark in marks}
    text = Text()
    for mark in line:
        text.append(mark, _STYLES[kinds[mark]] if mark in kinds else "")
    return text


def _head(summary: PipelineSummary) -> RenderableType:
    grid = Grid.grid(padding=(0, 2))
    grid.add_row("model", name(f"{summary.model or '(unnamed)'}, trained with {summary.optimizer}"))
    for given in summary.inputs:
        grid.add_row("input", name(given))
    grid.add_row("cluster", name(f"{summary.cluster}, {summary.world_size} devices"))
    for line in summary.imposed:
        grid.add_row("imposed", name(line))
    grid.add_row(
        "pipeline",
        f"{len(summary.stages)} stages, {summary.schedule} of {summary.microbatches} microbatches",
    )
    grid.add_row(
        "step",
        f"{format_ns(summary.step_ns)}, of which the busiest rank waits "
        f"{format_percent(summary.bubble)}",
    )
    if summary.utilisation:
        speed = f"{format_percent(summary.utilisation)} of the devices' peak FLOP/s"
        tokens = f"{summary.tokens_per_s:,} tokens/s, " if summary.tokens_per_s else ""
        grid.add_row("speed", tokens + speed)
    grid.add_row("memory", format_bytes_of(summary.memory_bytes, summary.memory_limit_bytes))
    grid.add_row("plan", name(summary.digest, "dim"))
    return grid


def _stages(summary: PipelineSummary) -> RenderableType:
    weights = ("weights",) * summary.is_split
    columns = ("params", "forward", "backward", *weights, "idle", "in flight", "memory")
    table = new_table(("stage", "begins with", "devices", "mesh"), columns)
    firsts = sorted({row.first_device for row in summary.stages})
    ends = dict(pairwise([*firsts, summary.world_size]))
    for row in summary.stages:
        table.add_row(
            str(row.stage),
            name(row.start or "(first)"),
            f"{row.first_device}-{ends[row.first_device] - 1}",
            name(row.mesh),
            str(row.num_params),
            format_ns(row.forward_ns),
            format_ns(row.backward_ns),
            *[format_ns(row.weights_ns)] * summary.is_split,
            format_percent(row.idle),
            str(row.in_flight),
            format_bytes(row.memory_bytes),
        )
    return table


def _sends(sends: tuple[Delay, ...]) -> RenderableType:
    if not sends:
        return Text("none")
    table = new_table(("from", "to", "phase"), ("bytes", "time"))
    for each in sends:
        table.add_row(
            str(each.source),
            str(each.target),
            each.phase,
            format_bytes(each.num_bytes),
            format_ns(each.time_ns),
        )
    return table
