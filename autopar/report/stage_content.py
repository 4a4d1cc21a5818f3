"""What a person wants to know of one stage: what was decided for it, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.graph import Phase
from autopar.ir.grouping import grouped
from autopar.ir.hardware import apportion
from autopar.ir.mesh import TO_HOST
from autopar.ir.units import format_bytes, format_ns, format_percent
from autopar.plans.estimates import CollectiveTotal, Memory, OpTotal
from autopar.plans.plan import StagePlan
from autopar.plans.requests.matching import general
from autopar.plans.structure import MeshAxis
from autopar.report.costs import Cost, CostKind, costliest, costs, memory_table, recompute_ns
from autopar.report.limits import AxisShare, Bottlenecks
from autopar.report.names import WHOLE_MODEL, short_op, tensor_name
from autopar.report.placed import REPLICATED, ParamGroup, param_groups
from autopar.report.printed import name, with_rest
from autopar.report.printed import table as new_table
from autopar.report.timeline import Bar, DrawnStep, block_of

TOP_COSTS = 12
MAX_ROWS = 60
"""Rows of a table that are printed; a last line counts the rest."""

_BLOCKS = "Blocks: time, hidden communication too, and saved memory of all of them together"
_KINDS = 8
_COSTS = "Top costs: all of a kind together, share of the step with nothing hidden"
_PATH = "Critical path: what the step takes its time for, all of a kind together"
_AXES = (
    "Communication by axis: time if nothing ran beside it; exposed is what of that costs the device"
)


@dataclass(frozen=True, slots=True)
class Block:
    """Modules of one pattern: `count` of them, times of all together, bytes saved for backward.
    `parts` are the children of a repeated block."""

    module: str
    count: int
    forward_ns: int
    backward_ns: int
    communication_ns: int
    optimizer_ns: int
    saved_bytes: int
    parts: tuple[Block, ...] = ()

    @property
    def total_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.communication_ns + self.optimizer_ns


@dataclass(frozen=True, slots=True)
class StageContent:
    """What a page says of stage `number`."""

    number: int
    mesh: tuple[MeshAxis, ...]
    recompute: tuple[str, ...]
    recompute_ns: int
    offloaded: tuple[str, ...]
    offloaded_bytes: int
    num_on_host: int
    on_host_bytes: int
    memory: Memory
    memory_limit_bytes: int
    blocks: tuple[Block, ...]
    top_costs: tuple[Cost, ...]
    critical_path: tuple[Cost, ...]
    axes: tuple[AxisShare, ...]
    collectives: tuple[CollectiveTotal, ...]
    params: tuple[ParamGroup, ...]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Lines at the head of its page, beside those of every plan."""
        if self.recompute:
            yield (
                "recompute",
                f"{len(self.recompute)} classes of ops, recomputed for backward in "
                f"{format_ns(self.recompute_ns)} instead of saved: {_kinds(self.recompute)}",
            )
        if self.offloaded:
            yield (
                "offload",
                f"{len(self.offloaded)} classes of activations, "
                f"{format_bytes(self.offloaded_bytes)} of them in the host's memory until "
                f"backward: {_kinds(self.offloaded)}",
            )
        if self.num_on_host:
            yield (
                "host",
                f"{self.num_on_host} of {sum(group.count for group in self.params)} parameters "
                "live in the host's memory, with gradients and the optimizer's states: "
                f"{format_bytes(self.on_host_bytes)} per device",
            )

    def sections(self) -> Iterator[tuple[str, RenderableType]]:
        """The tables, with their titles."""
        yield _BLOCKS, _block_table(self.blocks)
        yield _COSTS, _kinds_table(self.top_costs)
        yield _PATH, _critical_table(self.critical_path)
        yield _AXES, _axes(self.axes)
        yield "Parameters", _params(self)
        yield "Communication: all collectives of a step", _collectives(self)
        yield (
            "Memory per device at the peak",
            memory_table(self.memory, self.memory_limit_bytes),
        )


def stage_content(plan: StagePlan, step: DrawnStep, limits: Bottlenecks) -> StageContent:
    """The content for a stage, whose step is drawn so and has these limits."""
    structure, estimates = plan.structure, plan.estimates
    params = param_groups(structure.params, structure.mesh)
    copied = (t for t in estimates.collectives if (t.axis, t.phase) == (TO_HOST, Phase.FORWARD))
    offloaded_bytes = sum(t.num_bytes for t in copied) // structure.microbatches
    return StageContent(
        number=plan.number,
        mesh=structure.axes,
        recompute=structure.recompute,
        recompute_ns=recompute_ns(estimates),
        offloaded=structure.offloaded,
        offloaded_bytes=offloaded_bytes,
        num_on_host=sum(group.count for group in params if group.on_host),
        on_host_bytes=max(0, estimates.host_bytes - offloaded_bytes),
        memory=estimates.memory,
        memory_limit_bytes=estimates.memory_limit,
        blocks=blocks(tuple(estimates.ops.values())),
        top_costs=costs(estimates)[:TOP_COSTS],
        critical_path=critical_parts(plan, step),
        axes=limits.axes,
        collectives=tuple(
            sorted(estimates.collectives, key=lambda c: (-c.time_ns, c.axis, c.kind, c.phase))
        ),
        params=params,
    )


def blocks(ops: Sequence[OpTotal]) -> tuple[Block, ...]:
    """Ops by module. A repeated module (`layers.*`) is one row, with its children as parts; any
    other module stands for itself."""
    rows = grouped((row, (part, op)) for op in ops for row, part in [_row_and_part(op.module)])
    return _costliest_first(
        _block(row, [op for _, op in members], grouped(members)) for row, members in rows.items()
    )


def _row_and_part(module: str) -> tuple[str, str]:
    """(row, part) that the ops of a module count to; the part is empty for a row's own ops."""
    names = general(module).split(".")
    if "*" not in names:
        return module or WHOLE_MODEL, ""
    end = names.index("*") + 1
    return ".".join(names[:end]), "".join(names[end : end + 1])


def _block(module: str, ops: Sequence[OpTotal], parts: Mapping[str, Sequence[OpTotal]]) -> Block:
    forward = sum(op.compute_ns for op in ops if op.phase == Phase.FORWARD)
    return Block(
        module=module,
        count=max(1, *(op.count for op in ops)),
        forward_ns=forward,
        backward_ns=sum(op.compute_ns for op in ops) - forward,
        communication_ns=sum(op.communication_ns for op in ops),
        optimizer_ns=sum(op.optimizer_ns for op in ops),
        saved_bytes=sum(op.saved_bytes for op in ops),
        parts=_costliest_first(_block(name, some, {}) for name, some in parts.items() if name),
    )


def _costliest_first(rows: Iterable[Block]) -> tuple[Block, ...]:
    return tuple(sorted(rows, key=lambda block: (-block.total_ns, block.module)))


def _kinds(keys: Sequence[str]) -> str:
    """The kinds of ops that have these keys, those that most classes have first."""
    kinds = Counter(short_op(key.rpartition(":")[2].partition(".")[0]) for key in keys)
    ordered = sorted(kinds, key=lambda kind: (-kinds[kind], kind))
    return ", ".join(ordered[:_KINDS]) + ", ..." * (len(ordered) > _KINDS)


def _block_table(blocks: Sequence[Block]) -> RenderableType:
    figures = ("count", "forward", "backward", "communication", "optimizer", "saved")
    table = new_table(("module",), figures)
    rows = [row for block in blocks for row in (("", block), *(("  ", p) for p in block.parts))]
    for indent, block in rows[:MAX_ROWS]:
        table.add_row(
            Text(indent).append_text(name(block.module)),
            str(block.count),
            *map(format_ns, (block.forward_ns, block.backward_ns)),
            *map(format_ns, (block.communication_ns, block.optimizer_ns)),
            format_bytes(block.saved_bytes),
            style="dim" if indent else "",
        )
    return with_rest(table, len(rows), MAX_ROWS)


def _axes(axes: Sequence[AxisShare]) -> RenderableType:
    if not axes:
        return Text("none")
    table = new_table(
        ("axis", "over"),
        ("time", "exposed", "hidden"),
        (
            (
                *map(name, (each.axis, each.link)),
                *map(format_ns, (each.time_ns, each.exposed_ns, each.hidden_ns)),
            )
            for each in axes[:MAX_ROWS]
        ),
    )
    return with_rest(table, len(axes), MAX_ROWS)


def _params(part: StageContent) -> RenderableType:
    table = new_table(("parameter",), ("count", "local bytes", "shape"))
    table.add_column("stored; for backward", overflow="fold")
    for group in part.params[:MAX_ROWS]:
        placed = _placed(group.stored)
        if group.for_backward != group.storage:
            placed.append("\nbackward: ").append_text(_placed(group.for_backward))
        table.add_row(
            name(group.name),
            str(group.count),
            format_bytes(group.local_bytes),
            name("x".join(map(str, group.shape)) or "scalar"),
            placed,
        )
    return with_rest(table, len(part.params), MAX_ROWS)


def _collectives(part: StageContent) -> RenderableType:
    if not part.collectives:
        return Text("none")
    table = new_table(
        ("axis", "kind", "phase"),
        ("count", "local bytes", "time"),
        (
            (
                *map(name, (total.axis, total.kind, total.phase)),
                str(total.count),
                format_bytes(total.num_bytes),
                format_ns(total.time_ns),
            )
            for total in part.collectives[:MAX_ROWS]
        ),
    )
    return with_rest(table, len(part.collectives), MAX_ROWS)


def _placed(sharding: str) -> Text:
    return name(sharding, "yellow" if sharding == REPLICATED else "cyan")


# The critical path of a step (`ir.hardware`) in a few rows, one for each kind of op or message.

_MAX_CRITICAL = 8
"""Rows that are printed."""


def critical_parts(plan: StagePlan, step: DrawnStep) -> tuple[Cost, ...]:
    """The parts of the critical path of `step` by kind, the longest first. For `time_ns` of the
    step, all else waits for ops or messages of that kind, or is hidden behind them. Contention is
    in their time. Times add up to the step of the plan, from which the drawn one may differ by
    rounding."""
    bars = grouped((_critical_kind(plan, bar), bar.duration_ns) for bar in step.path)
    step_ns = plan.estimates.step_ns
    times_ns = apportion(step_ns, [sum(each) for each in bars.values()])
    rows = ((kind, len(bars[kind]), ns) for kind, ns in zip(bars, times_ns, strict=True))
    return costliest(rows, step_ns)


def _critical_kind(plan: StagePlan, bar: Bar) -> CostKind:
    part = bar.part
    if part.is_sent:
        where = part.module or tensor_name(plan.estimates, part.key)
        return f"{part.what} on {part.axis}", block_of(where, inner=1), part.phase
    return part.track.kind, block_of(part.module) or WHOLE_MODEL, part.phase


def _critical_table(parts: Sequence[Cost]) -> RenderableType:
    if not parts:
        return Text("not known: the plan does not say in which order its step does what")
    return with_rest(_kinds_table(parts[:_MAX_CRITICAL]), len(parts), _MAX_CRITICAL)


def _kinds_table(parts: Sequence[Cost]) -> Table:
    return new_table(
        ("what", "where", "phase"),
        ("count", "time", "share"),
        (
            (
                *map(name, (part.what, part.where, part.phase)),
                str(part.count),
                format_ns(part.time_ns),
                format_percent(part.share),
            )
            for part in parts
        ),
    )
