"""A plan as a page for a terminal, made of rich renderables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_bytes, format_seconds
from autopar.plans.plan import Memory, Plan
from autopar.report.holders import held_by
from autopar.report.names import clean, escape
from autopar.report.param_groups import REPLICATED
from autopar.report.summary import Block, Summary, summarize
from autopar.report.tables import table as new_table

MAX_SENTENCE = 600
MAX_ROWS = 60
"""Rows of a table that are printed; a last line counts the rest."""


def show(plan: Plan) -> RenderableType:
    """The page of a plan: what was chosen, what it is predicted to cost, how good it is proven."""
    return page(summarize(plan))


def page(summary: Summary) -> RenderableType:
    """The page of a summary."""
    sections: list[RenderableType] = [_head(summary)]
    for title, content in (
        ("Blocks: time and saved memory of all of them together", _blocks(summary.blocks)),
        ("Top costs: all of a kind together, per device and step", _top_costs(summary)),
        ("Parameters", _params(summary)),
        ("Communication: all collectives of a step", _collectives(summary)),
        ("Memory per device at the peak", _memory(summary.memory, summary.memory_limit_bytes)),
    ):
        sections += [Text(""), Text(title, style="bold"), Padding(content, (0, 0, 0, 2))]
    sections += [Text("")] * bool(summary.warnings)
    sections += [Text("warning: ", "yellow").append_text(_name(w)) for w in summary.warnings]
    return Group(*sections)


def _head(summary: Summary) -> RenderableType:
    devices = f"{summary.world_size} device" + ("s" if summary.world_size != 1 else "")
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in summary.mesh)
    peak, limit = summary.memory_bytes, summary.memory_limit_bytes
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        "model", _name(f"{summary.model or '(unnamed)'}, trained with {summary.optimizer}")
    )
    for given in summary.inputs:
        grid.add_row("input", _name(given))
    grid.add_row("cluster", _name(f"{summary.cluster}, {devices}" + (f": {axes}" if axes else "")))
    for line in summary.imposed:
        grid.add_row("imposed", _name(line))
    grid.add_row("step", _step(summary))
    if summary.utilisation:
        speed = f"{100 * summary.utilisation:.3g} % of the devices' peak FLOP/s"
        tokens = f"{summary.tokens_per_s:,} tokens/s, " if summary.tokens_per_s else ""
        grid.add_row("speed", tokens + speed)
    grid.add_row("memory", f"{format_bytes(peak)} of {format_bytes(limit)}{_percent(peak, limit)}")
    proof = _name(summary.status, "green" if summary.status == "optimal" else "yellow")
    grid.add_row(
        "proof",
        proof.append(
            f": {_time(summary.objective_ns)}, proven bound {_time(summary.bound_ns)}, "
            f"gap {100 * summary.gap:.3g} %",
            style="default",
        ),
    )
    if summary.margin:
        grid.add_row("margin", Text(escape(summary.margin[:MAX_SENTENCE])))
    if len(summary.meshes_tried) > 1:
        grid.add_row("search", _name(f"best of meshes {'; '.join(summary.meshes_tried)}"))
    grid.add_row("plan", _name(f"{summary.digest} ({summary.made_by})", "dim"))
    return grid


def _step(summary: Summary) -> str:
    parts = [
        f"compute {_time(summary.compute_ns)}",
        f"exposed communication {_time(summary.exposed_communication_ns)}",
        f"optimizer {_time(summary.optimizer_ns)}",
    ]
    hidden = summary.hidden_communication_ns
    if hidden:
        parts.append(f"hidden communication {_time(hidden)}")
    return f"{_time(summary.step_ns)}: {', '.join(parts)}"


def _blocks(blocks: Sequence[Block]) -> RenderableType:
    figures = ("count", "forward", "backward", "communication", "optimizer", "saved")
    table = new_table(("module",), figures)
    rows = [row for block in blocks for row in (("", block), *(("  ", p) for p in block.parts))]
    for indent, block in rows[:MAX_ROWS]:
        table.add_row(
            Text(indent).append_text(_name(block.module)),
            str(block.count),
            *map(_time, (block.forward_ns, block.backward_ns)),
            *map(_time, (block.communication_ns, block.optimizer_ns)),
            format_bytes(block.saved_bytes),
            style="dim" if indent else "",
        )
    return _with_rest(table, len(rows))


def _top_costs(summary: Summary) -> RenderableType:
    table = new_table(("what", "where", "phase"), ("count", "time", "of the step"))
    for cost in summary.top_costs:
        table.add_row(
            *map(_name, (cost.what, cost.where, cost.phase)),
            str(cost.count),
            _time(cost.time_ns),
            f"{100 * cost.share:.3g} %",
        )
    return table


def _params(summary: Summary) -> RenderableType:
    table = new_table(("parameter",), ("count", "per device", "shape"))
    table.add_column("stored; kept for backward", overflow="fold")
    for group in summary.params[:MAX_ROWS]:
        placed = _placed(group.storage)
        if group.kept != group.storage:
            placed.append("\nkept ").append_text(_placed(group.kept))
        table.add_row(
            _name(group.name),
            str(group.count),
            format_bytes(group.local_bytes),
            _name("x".join(map(str, group.shape)) or "scalar"),
            placed,
        )
    return _with_rest(table, len(summary.params))


def _collectives(summary: Summary) -> RenderableType:
    if not summary.collectives:
        return Text("none")
    table = new_table(("axis", "kind", "phase"), ("count", "local bytes", "time"))
    for total in summary.collectives[:MAX_ROWS]:
        table.add_row(
            *map(_name, (total.axis, total.kind, total.phase)),
            str(total.count),
            format_bytes(total.num_bytes),
            _time(total.time_ns),
        )
    return _with_rest(table, len(summary.collectives))


def _memory(memory: Memory, limit: int) -> RenderableType:
    table = new_table(("held by",), ("bytes", "of the limit"))
    for holder, num_bytes in held_by(memory).items():
        table.add_row(holder, format_bytes(num_bytes), _percent(num_bytes, limit).strip(" ()"))
    peak = _percent(memory.total, limit).strip(" ()")
    table.add_row("together", format_bytes(memory.total), peak, style="bold")
    return table


def _with_rest(table: Table, num_rows: int) -> RenderableType:
    if num_rows <= MAX_ROWS:
        return table
    return Group(table, Text(f"... and {num_rows - MAX_ROWS} more (--json lists all)"))


def _name(text: str, style: str = "") -> Text:
    return Text(clean(text), style=style)


def _placed(sharding: str) -> Text:
    return Text().append_text(_name(sharding, "yellow" if sharding == REPLICATED else "cyan"))


def _time(ns: int) -> str:
    return format_seconds(ns / 1e9)


def _percent(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.3g} %)" if whole else ""
