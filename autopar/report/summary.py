"""What a person wants to know of a plan, gathered from its parts: the content of every report, and
its page: what was chosen, what it is predicted to cost, how good it is proven.

Figures are per device and per training step. Rows are ordered by what they cost, then by name, so
that the same plan always gives the same page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.graph import Phase
from autopar.ir.mesh import TO_HOST
from autopar.ir.units import format_bytes, format_bytes_of, format_ns, format_percent
from autopar.plans.estimates import CollectiveTotal, Memory, OpTotal
from autopar.plans.matching import general
from autopar.plans.plan import PROVEN, MeshAxis, Plan, Provenance
from autopar.report.cautions import cautions
from autopar.report.costs import Cost, again_ns, costs
from autopar.report.critical_parts import CriticalPart, critical_parts, critical_table
from autopar.report.held import HOST_LABEL, HostUse, host_table, host_use, memory_table
from autopar.report.limits import AxisShare, find_limits, margin_text
from autopar.report.names import WHOLE_MODEL, escape, short_op
from autopar.report.placed import REPLICATED, ParamGroup, param_groups
from autopar.report.printed import Printed, name, section, speed_text, with_rest
from autopar.report.printed import table as new_table
from autopar.report.timeline import timeline

TOP_COSTS = 12
MAX_SENTENCE = 600
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
class Summary(Printed):
    """The content of the page. `gap` and `utilisation` are fractions; `warnings` are sentences."""

    model: str
    cluster: str
    mesh: tuple[MeshAxis, ...]
    world_size: int
    optimizer: str
    inputs: tuple[str, ...]
    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_communication_ns: int
    hidden_communication_ns: int
    exposed_host_ns: int
    optimizer_ns: int
    flops: int
    tokens_per_s: int
    samples_per_s: int
    utilisation: float
    status: str
    objective_ns: int
    bound_ns: int
    gap: float
    margin: str
    meshes_tried: tuple[str, ...]
    imposed: tuple[str, ...]
    microbatches: int
    loss_chunks: int
    again: tuple[str, ...]
    again_ns: int
    offloaded: tuple[str, ...]
    offloaded_bytes: int
    num_hosted: int
    hosted_bytes: int
    memory: Memory
    memory_bytes: int
    memory_limit_bytes: int
    host: HostUse | None
    blocks: tuple[Block, ...]
    top_costs: tuple[Cost, ...]
    critical_path: tuple[CriticalPart, ...]
    axes: tuple[AxisShare, ...]
    collectives: tuple[CollectiveTotal, ...]
    params: tuple[ParamGroup, ...]
    warnings: tuple[str, ...]
    digest: str
    made_by: str

    def page(self) -> RenderableType:
        sections: list[RenderableType] = [_head(self)]
        for title, content in (
            (_BLOCKS, _block_table(self.blocks)),
            (_COSTS, _top_costs(self)),
            (_PATH, critical_table(self.critical_path)),
            (_AXES, _axes(self.axes)),
            ("Parameters", _params(self)),
            ("Communication: all collectives of a step", _collectives(self)),
            ("Memory per device at the peak", memory_table(self.memory, self.memory_limit_bytes)),
            *((use.title, host_table(use)) for use in (self.host,) if use is not None),
        ):
            sections += section(title, content)
        sections += [Text("")] * bool(self.warnings)
        sections += [Text("warning: ", "yellow").append_text(name(w)) for w in self.warnings]
        return Group(*sections)


def summarize(plan: Plan) -> Summary:
    """The summary of a plan."""
    structure, estimates, provenance = plan.structure, plan.estimates, plan.provenance
    params = param_groups(structure.params, structure.mesh)
    step = timeline(plan)
    limits = find_limits(plan, step)
    copied = (t for t in estimates.collectives if (t.axis, t.phase) == (TO_HOST, Phase.FORWARD))
    away = sum(t.num_bytes for t in copied) // structure.schedule.microbatches
    return Summary(
        model=structure.model,
        cluster=structure.cluster,
        mesh=structure.axes,
        world_size=plan.world_size,
        optimizer=structure.optimizer,
        inputs=structure.inputs,
        step_ns=estimates.step_ns,
        compute_ns=estimates.compute_ns,
        communication_ns=estimates.communication_ns,
        exposed_communication_ns=estimates.exposed_communication_ns,
        exposed_host_ns=estimates.exposed_host_ns,
        hidden_communication_ns=estimates.hidden_communication_ns,
        optimizer_ns=estimates.optimizer_ns,
        flops=estimates.flops,
        tokens_per_s=estimates.tokens_per_s,
        samples_per_s=estimates.samples_per_s,
        utilisation=estimates.mfu_ppm / 1e6,
        status=provenance.status,
        objective_ns=provenance.objective_ns,
        bound_ns=provenance.bound_ns,
        gap=provenance.gap_ppm / 1e6,
        margin=margin_text(limits) if provenance.margin else "",
        meshes_tried=provenance.meshes_tried,
        imposed=provenance.imposed,
        microbatches=structure.schedule.microbatches,
        loss_chunks=structure.schedule.loss_chunks,
        again=structure.again,
        again_ns=again_ns(estimates),
        offloaded=structure.offloaded,
        offloaded_bytes=away,
        num_hosted=sum(group.count for group in params if group.on_host),
        hosted_bytes=max(0, estimates.host_bytes - away),
        memory=estimates.memory,
        memory_bytes=estimates.memory.total,
        memory_limit_bytes=estimates.memory_limit,
        host=host_use(plan),
        blocks=blocks(tuple(estimates.ops.values())),
        top_costs=costs(estimates)[:TOP_COSTS],
        critical_path=critical_parts(plan, step),
        axes=limits.axes,
        collectives=tuple(
            sorted(estimates.collectives, key=lambda c: (-c.time_ns, c.axis, c.kind, c.phase))
        ),
        params=params,
        warnings=tuple(cautions(plan, params)),
        digest=plan.digest,
        made_by=made_by(provenance),
    )


def made_by(provenance: Provenance) -> str:
    """Which versions made a plan."""
    return f"autopar {provenance.autopar}, torch {provenance.torch}, {provenance.solver}"


def blocks(ops: Sequence[OpTotal]) -> tuple[Block, ...]:
    """Ops by module. A repeated module (`layers.*`) is one row, with its children as parts; any
    other module stands for itself."""
    rows: dict[str, dict[str, list[OpTotal]]] = {}
    for op in ops:
        row, part = _row_and_part(op.module)
        rows.setdefault(row, {}).setdefault(part, []).append(op)
    return _costliest_first(
        _block(row, [op for some in members.values() for op in some], members)
        for row, members in rows.items()
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


def _head(summary: Summary) -> RenderableType:
    devices = f"{summary.world_size} device" + ("s" if summary.world_size != 1 else "")
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in summary.mesh)
    peak, limit = summary.memory_bytes, summary.memory_limit_bytes
    grid = Table.grid(padding=(0, 2))
    grid.add_row("model", name(f"{summary.model or '(unnamed)'}, trained with {summary.optimizer}"))
    for given in summary.inputs:
        grid.add_row("input", name(given))
    grid.add_row("cluster", name(f"{summary.cluster}, {devices}" + (f": {axes}" if axes else "")))
    for line in summary.imposed:
        grid.add_row("imposed", name(line))
    grid.add_row("step", _step(summary))
    if summary.utilisation:
        grid.add_row("speed", speed_text(summary))
    grid.add_row("memory", format_bytes_of(peak, limit))
    if summary.host is not None:
        grid.add_row(HOST_LABEL, summary.host.text)
    if summary.loss_chunks > 1:
        grid.add_row("loss", f"in {summary.loss_chunks} chunks of a device's rows, one at a time")
    if summary.microbatches > 1:
        grid.add_row("batch", f"in {summary.microbatches} microbatches, one after the other")
    if summary.again:
        grid.add_row("again", name(_again(summary)))
    if summary.offloaded:
        grid.add_row("offload", name(_offloaded(summary)))
    if summary.num_hosted:
        grid.add_row("host", name(_hosted(summary)))
    proof = name(summary.status, "green" if summary.gap <= PROVEN else "yellow")
    bound = f"proven bound {format_ns(summary.bound_ns)}, gap {format_percent(summary.gap)}"
    found = f": {format_ns(summary.objective_ns)} as modelled, {bound}"
    grid.add_row("proof", proof.append(found, style="default"))
    if summary.margin:
        grid.add_row("margin", Text(escape(summary.margin[:MAX_SENTENCE])))
    if len(summary.meshes_tried) > 1:
        grid.add_row("search", name(f"best of meshes {'; '.join(summary.meshes_tried)}"))
    grid.add_row("plan", name(f"{summary.digest} ({summary.made_by})", "dim"))
    return grid


def _again(summary: Summary) -> str:
    """What backward makes again, in words."""
    return (
        f"{len(summary.again)} classes of ops, made again for backward in "
        f"{format_ns(summary.again_ns)} instead of saved: {_kinds(summary.again)}"
    )


def _offloaded(summary: Summary) -> str:
    """What is handed over in the host's memory, in words."""
    return (
        f"{len(summary.offloaded)} classes of activations, {format_bytes(summary.offloaded_bytes)} "
        f"of them in the host's memory until backward: {_kinds(summary.offloaded)}"
    )


def _hosted(summary: Summary) -> str:
    """What lives in the host's memory, in words."""
    count = sum(group.count for group in summary.params)
    return (
        f"{summary.num_hosted} of {count} parameters live in the host's memory, with gradients and "
        f"the optimizer's states: {format_bytes(summary.hosted_bytes)} per device"
    )


def _kinds(keys: Sequence[str]) -> str:
    """The kinds of ops that have these keys, those that most classes have first."""
    kinds = Counter(short_op(key.rpartition(":")[2].partition(".")[0]) for key in keys)
    ordered = sorted(kinds, key=lambda kind: (-kinds[kind], kind))
    return ", ".join(ordered[:_KINDS]) + ", ..." * (len(ordered) > _KINDS)


def _step(summary: Summary) -> str:
    parts = [
        f"compute {format_ns(summary.compute_ns)}",
        f"exposed communication {format_ns(summary.exposed_communication_ns)}",
        f"optimizer {format_ns(summary.optimizer_ns)}",
    ]
    if summary.exposed_host_ns:
        parts.append(f"waiting for the host {format_ns(summary.exposed_host_ns)}")
    hidden = summary.hidden_communication_ns
    if hidden:
        parts.append(f"hidden communication {format_ns(hidden)}")
    return f"{format_ns(summary.step_ns)}: {', '.join(parts)}"


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


def _top_costs(summary: Summary) -> RenderableType:
    table = new_table(("what", "where", "phase"), ("count", "time", "share"))
    for cost in summary.top_costs:
        table.add_row(
            *map(name, (cost.what, cost.where, cost.phase)),
            str(cost.count),
            format_ns(cost.time_ns),
            format_percent(cost.share),
        )
    return table


def _axes(axes: Sequence[AxisShare]) -> RenderableType:
    if not axes:
        return Text("none")
    table = new_table(("axis", "over"), ("time", "exposed", "hidden"))
    for each in axes[:MAX_ROWS]:
        figures = map(format_ns, (each.time_ns, each.exposed_ns, each.hidden_ns))
        table.add_row(*map(name, (each.axis, each.link)), *figures)
    return with_rest(table, len(axes), MAX_ROWS)


def _params(summary: Summary) -> RenderableType:
    table = new_table(("parameter",), ("count", "per device", "shape"))
    table.add_column("stored; kept for backward", overflow="fold")
    for group in summary.params[:MAX_ROWS]:
        placed = _placed(group.stored)
        if group.kept != group.storage:
            placed.append("\nkept ").append_text(_placed(group.kept))
        table.add_row(
            name(group.name),
            str(group.count),
            format_bytes(group.local_bytes),
            name("x".join(map(str, group.shape)) or "scalar"),
            placed,
        )
    return with_rest(table, len(summary.params), MAX_ROWS)


def _collectives(summary: Summary) -> RenderableType:
    if not summary.collectives:
        return Text("none")
    table = new_table(("axis", "kind", "phase"), ("count", "local bytes", "time"))
    for total in summary.collectives[:MAX_ROWS]:
        table.add_row(
            *map(name, (total.axis, total.kind, total.phase)),
            str(total.count),
            format_bytes(total.num_bytes),
            format_ns(total.time_ns),
        )
    return with_rest(table, len(summary.collectives), MAX_ROWS)


def _placed(sharding: str) -> Text:
    return Text().append_text(name(sharding, "yellow" if sharding == REPLICATED else "cyan"))
