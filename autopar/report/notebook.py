"""A plan as a fragment of HTML, for the cell of a notebook: self-contained, all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autopar.ir.units import format_bytes, format_seconds
from autopar.report.names import clean
from autopar.report.summary import Block, Summary

MAX_ROWS = 30

_NUMBER = ' style="text-align:right"'
_WORDS = ' style="text-align:left"'


def fragment(summary: Summary) -> str:
    """Headline, warnings, blocks and parameters of a plan."""
    return (
        "<div>"
        f"{_headline(summary)}"
        f"{''.join(f'<p><b>Warning:</b> {_text(warning)}</p>' for warning in summary.warnings)}"
        f"{_blocks(summary.blocks)}"
        f"{_params(summary)}"
        "</div>"
    )


def _headline(summary: Summary) -> str:
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in summary.mesh)
    step = (
        f"step {_time(summary.step_ns)}: compute {_time(summary.compute_ns)}, communication "
        f"{_time(summary.communication_ns)}, optimizer {_time(summary.optimizer_ns)}"
    )
    peak, limit = format_bytes(summary.memory_bytes), format_bytes(summary.memory_limit_bytes)
    where = f"{summary.cluster}, mesh {axes}" if axes else summary.cluster
    return (
        f"<p><b>{_text(summary.model or '(unnamed)')}</b> on {_text(where)}<br>"
        f"{_text(step)}<br>memory {peak} of {limit}; {_text(summary.status)}</p>"
    )


def _blocks(blocks: Sequence[Block]) -> str:
    figures = ("count", "forward", "backward", "communication", "optimizer", "saved")
    rows = (
        (
            (block.module,),
            (
                str(block.count),
                *map(_time, (block.forward_ns, block.backward_ns)),
                *map(_time, (block.communication_ns, block.optimizer_ns)),
                format_bytes(block.saved_bytes),
            ),
        )
        for block in blocks[:MAX_ROWS]
    )
    return _table("Blocks", ("module",), figures, rows, len(blocks))


def _params(summary: Summary) -> str:
    words = ("parameter", "stored", "kept for backward")
    rows = (
        (
            (group.name, group.storage, "" if group.kept == group.storage else group.kept),
            (str(group.count), format_bytes(group.local_bytes), "x".join(map(str, group.shape))),
        )
        for group in summary.params[:MAX_ROWS]
    )
    figures = ("count", "per device", "shape")
    return _table("Parameters", words, figures, rows, len(summary.params))


def _table(
    title: str,
    words: Sequence[str],
    figures: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Sequence[str]]],
    num_rows: int,
) -> str:
    """A table under a title that folds it away."""
    head = "".join(f"<th{_WORDS}>{word}</th>" for word in words)
    head += "".join(f"<th{_NUMBER}>{figure}</th>" for figure in figures)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_WORDS}>{_text(cell)}</td>" for cell in texts)
        + "".join(f"<td{_NUMBER}>{_text(cell)}</td>" for cell in numbers)
        + "</tr>"
        for texts, numbers in rows
    )
    rest = f"<p>... and {num_rows - MAX_ROWS} more</p>" if num_rows > MAX_ROWS else ""
    return (
        f"<details open><summary>{title}</summary><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{rest}</details>"
    )


def _text(text: str) -> str:
    return escape(" ".join(map(clean, text.split(" "))))


def _time(ns: int) -> str:
    return format_seconds(ns / 1e9)
