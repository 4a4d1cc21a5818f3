"""The result of a verification as a page for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_count
from autopar.report.names import clean
from autopar.runtime.simulator.comparison import Report

_MAX_ROWS = 12
"""Tensors that are listed; all count."""


def page(report: Report) -> RenderableType:
    """The worst differences and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("tensor", overflow="fold")
    table.add_column("relative difference", justify="right")
    exact = any(d.exact is not None for d in report.differences)
    if exact:
        table.add_column("in float64", justify="right")
    table.add_column("largest magnitude", justify="right")
    failed = report.failed
    shown = sorted(report.differences, key=lambda d: (d not in failed, -d.relative, d.name))
    for difference in shown[:_MAX_ROWS]:
        table.add_row(
            Text(clean(difference.name), style="red" if difference in failed else ""),
            difference.why or f"{difference.relative:.2g}",
            *([_number(difference.exact)] if exact else []),
            f"{difference.largest:.3g}",
        )
    if len(shown) > _MAX_ROWS:
        table.add_row(Text(f"... and {len(shown) - _MAX_ROWS} more, all closer", style="dim"))
    verdict = (
        Text(f"{len(failed)} of {len(shown)} tensors differ", style="red")
        if failed
        else Text(f"equal: loss and gradients, {len(shown)} tensors", style="green")
    )
    num_resolved = sum(d not in failed and not d.relative <= report.tolerance for d in shown)
    if num_resolved:
        verdict.append(f", {num_resolved} of them in float64")
    verdict.append(
        f", {format_count(report.num_ranks, 'rank')} against eager, {report.dtype}, "
        f"tolerance {report.tolerance:g}, seed {report.seed}",
        style="default",
    )
    notes = [Text(clean(f"note: {note}")) for note in report.notes]
    named = Text(clean(f"{report.model or '(unnamed)'}, plan {report.plan}"))
    return Group(named, table, Text(""), *notes, verdict)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
