"""The Gantt picture of a panel of the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from autopar.ir.units import format_ns
from autopar.report.html.schedule import Block, Panel, Row
from autopar.report.html.svg import cut, fitting, line, picture, rect, text, ticks
from autopar.report.timeline import Track

WIDTH = 1080
_LEFT, _RIGHT = 132, 14
_ROW, _GAP, _SPAN, _AXIS = 30, 6, 26, 26
_SIZE = 11.5
_BOLD = 1.1


def gantt(panel: Panel, colours: Mapping[Track, str]) -> Markup:
    """The picture; `colours` has the class of each track."""
    top = (_SPAN + _GAP) if panel.spans else 0
    height = top + len(panel.rows) * (_ROW + _GAP) + _AXIS
    children = [
        *_time_axis(panel, height),
        *(_span(panel, span, height) for span in panel.spans),
        *(text(_LEFT - 10, 17, "repeated", "mute", "end") for _ in panel.spans[:1]),
    ]
    for k, row in enumerate(panel.rows):
        children += _row(panel, row, top + k * (_ROW + _GAP), colours.get(row.track, "other"))
    return picture(WIDTH, height, f"{panel.title}: when each track is busy", children)


def _x(panel: Panel, ns: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * ns / panel.ns


def _time_axis(panel: Panel, height: float) -> Iterator[Markup]:
    for at in ticks(panel.ns):
        x = _x(panel, at)
        yield line(x, 0, x, height - _AXIS, "grid")
        label = format_ns(at) if at else "0"
        anchor = "end" if x > WIDTH - 40 else "middle"
        yield text(min(x, WIDTH - 4), height - 8, label, "mute", anchor)


def _span(panel: Panel, span: Block, height: float) -> Markup:
    x, end = _x(panel, span.start_ns), _x(panel, span.end_ns)
    label = fitting(span.labels, _BOLD * _SIZE, end - x - 6)
    return Markup("").join(
        (
            rect(x, 0, end - x, height - _AXIS, "span", span.tip, 4),
            text((x + end) / 2, 17, label, "strong", "middle"),
        )
    )


def _row(panel: Panel, row: Row, y: float, colour: str) -> Iterator[Markup]:
    label = cut(row.track.name, _SIZE, _LEFT - 14)
    yield text(_LEFT - 10, y + _ROW / 2 + 4, label, "", "end")
    yield line(_LEFT, y + _ROW, WIDTH - _RIGHT, y + _ROW, "base")
    for block in row.blocks:
        x, end = _x(panel, block.start_ns), _x(panel, block.end_ns)
        high = _ROW * block.busy
        if block.busy < 1:
            yield rect(x, y, end - x, _ROW, f"idle {colour}", block.tip, 0)
        yield rect(x, y + _ROW - high, end - x, high, f"bar {colour}", block.tip, 1)
        label = fitting(block.labels, _SIZE, end - x - 6)
        if label:
            inside = "inbar" if high > 17 else ""
            base = y + _ROW - high / 2 + 4 if inside else y + _ROW - high - 4
            yield text((x + end) / 2, base, label, inside, "middle")
