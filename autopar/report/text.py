"""A plan as a page for a terminal, made of rich renderables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.plan import Memory, Plan
from autopar.report.names import clean
from autopar.report.summary import REPLICATED, Block, Summary, summarize
from autopar.units import format_bytes, format_seconds

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
    grid.add_row(
        "step",
        f"{_time(summary.step_ns)}: compute {_time(summary.compute_ns)}, "
        f"communication {_time(summary.communication_ns)}, "
        f"optimizer {_time(summary.optimizer_ns)}",
    )
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
    if len(summary.meshes_tried) > 1:
        grid.add_row("search", _name(f"best of meshes {'; '.join(summary.meshes_tried)}"))
    grid.add_row("plan", _name(f"{summary.digest} ({summary.made_by})", "dim"))
    return grid


def _blocks(blocks: Sequence[Block]) -> RenderableType:
    figures = ("count", "forward", "backward", "communication", "optimizer", "saved")
    table = _table(("module",), figures)
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


def _params(summary: Summary) -> RenderableType:
    table = _table(("parameter",), ("count", "per device", "shape"))
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
    table = _table(("axis", "kind", "phase"), ("count", "local bytes", "time"))
    for total in summary.collectives[:MAX_ROWS]:
        table.add_row(
            *map(_name, (total.axis, total.kind, total.phase)),
            str(total.count),
            format_bytes(total.num_bytes),
            _time(total.time_ns),
        )
    return _with_rest(table, len(summary.collectives))


def _memory(memory: Memory, limit: int) -> RenderableType:
    table = _table(("held by",), ("bytes", "of the limit"))
    for holder, num_bytes in (
        ("parameters", memory.params),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer),
        ("parameters kept for backward", memory.kept),
        ("activations saved for backward", memory.saved),
        ("all else that is live", memory.transient),
    ):
        table.add_row(holder, format_bytes(num_bytes), _percent(num_bytes, limit).strip(" ()"))
    peak = _percent(memory.total, limit).strip(" ()")
    table.add_row("together", format_bytes(memory.total), peak, style="bold")
    return table


def _table(words: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in words:
        table.add_column(title, overflow="fold")
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True)
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
