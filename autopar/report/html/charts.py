"""The Gantt picture of a panel of the schedule, and that of memory over time: stacked areas against
the limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from autopar.ir.units import format_bytes, format_ns
from autopar.report.html.memory import MemoryUse
from autopar.report.html.schedule import ActionTrack, DrawnBar, Panel, TrackRow
from autopar.report.html.svg import (
    cut,
    first_that_fits,
    line,
    picture,
    points,
    rect,
    svg_path,
    text,
    text_width,
    ticks,
)
from autopar.report.timeline import Track

WIDTH = 1080
_LEFT, _FROM, _RIGHT = 132, 78, 14
"""Where time begins in a picture of tracks and in one of memory, and what is left at its end."""
_ROW, _GAP, _SPAN, _AXIS = 30, 6, 26, 26
_TOP, _BOTTOM, _HEIGHT = 22, 26, 320
_SIZE = 11.5
_BOLD = 1.1


def gantt(panel: Panel, colours: Mapping[Track | ActionTrack, str]) -> Markup:
    """The picture; `colours` has the class of each track."""
    top = (_SPAN + _GAP) if panel.spans else 0
    height = top + len(panel.rows) * (_ROW + _GAP) + _AXIS
    children = [
        *_grid(panel, height),
        *_time_ticks(panel.ns, _LEFT, height),
        *(_span(panel, span, height) for span in panel.spans),
        *(text(_LEFT - 10, 17, "repeated", "mute", "end") for _ in panel.spans[:1]),
    ]
    for k, row in enumerate(panel.rows):
        children += _row(panel, row, top + k * (_ROW + _GAP), colours)
    return picture(WIDTH, height, f"{panel.title}: when each track is busy", children)


def _x(at: float, end: float, left: float = _LEFT) -> float:
    return left + (WIDTH - left - _RIGHT) * at / end


def _time_ticks(end_ns: int, left: float, height: float) -> Iterator[Markup]:
    for at in ticks(end_ns):
        x = _x(at, end_ns, left)
        anchor = "end" if x > WIDTH - 40 else "middle"
        yield text(min(x, WIDTH - 4), height - 8, format_ns(at) if at else "0", "mute", anchor)


def _grid(panel: Panel, height: float) -> Iterator[Markup]:
    for at in ticks(panel.ns):
        x = _x(at, panel.ns)
        yield line(x, 0, x, height - _AXIS, "grid")


def _span(panel: Panel, span: DrawnBar, height: float) -> Markup:
    x, end = _x(span.start_ns, panel.ns), _x(span.end_ns, panel.ns)
    label = first_that_fits(span.labels, _BOLD * _SIZE, end - x - 6)
    return Markup("").join(
        (
            rect(x, 0, end - x, height - _AXIS, "span", span.tip, 4),
            text((x + end) / 2, 17, label, "strong", "middle"),
        )
    )


def _row(
    panel: Panel, row: TrackRow, y: float, colours: Mapping[Track | ActionTrack, str]
) -> Iterator[Markup]:
    label = cut(row.title, _SIZE, _LEFT - 14)
    yield text(_LEFT - 10, y + _ROW / 2 + 4, label, "", "end")
    yield line(_LEFT, y + _ROW, WIDTH - _RIGHT, y + _ROW, "base")
    for block in row.blocks:
        x, end = _x(block.start_ns, panel.ns), _x(block.end_ns, panel.ns)
        high, bottom = _ROW * block.busy, y + _ROW * (1 - block.base)
        colour = colours.get(block.track, "other")
        if block.busy < 1:
            yield rect(x, y, end - x, bottom - y, f"idle {colour}", block.tip, 0)
        yield rect(x, bottom - high, end - x, high, f"bar {colour}", block.tip, 1)
        label = first_that_fits(block.labels, _SIZE, end - x - 6)
        if label:
            inside = "inbar" if high > 17 else ""
            base = bottom - high / 2 + 4 if inside else bottom - high - 4
            yield text((x + end) / 2, base, label, inside, "middle")


def areas(use: MemoryUse) -> Markup:
    """The picture; `use` has columns."""
    end_ns = use.columns[-1].end_ns
    most = max(use.limit, *(column.total for column in use.columns), 1) * 1.04
    children = [
        *_axes(end_ns, most),
        *(_area(use, k, end_ns, most) for k in reversed(range(len(use.holders)))),
        *_limit(use, most),
        *_peak(use, end_ns, most),
    ]
    return picture(WIDTH, _HEIGHT, "Memory of each device over the step, by holder", children)


def memory_bars(uses: Sequence[tuple[str, MemoryUse]]) -> Markup:
    """A bar for each title: what is held at the peak by whom, against its limit."""
    most = max(1, *(max(use.limit, use.peak) for _, use in uses)) * 1.04
    height = len(uses) * (_ROW + _GAP) + _AXIS
    unit = _unit(most)
    children: list[Markup] = []
    for at in ticks(most / unit, 8):
        x = _x(at * unit, most)
        children += [
            line(x, 0, x, height - _AXIS, "grid"),
            text(x, height - 8, format_bytes(round(at * unit)), "mute", "middle"),
        ]
    for k, (title, use) in enumerate(uses):
        children += _bar(title, use, k * (_ROW + _GAP), most)
    return picture(WIDTH, height, "Memory of each stage at the peak, by holder", children)


def _bar(title: str, use: MemoryUse, y: float, most: float) -> Iterator[Markup]:
    yield text(_LEFT - 10, y + _ROW / 2 + 4, cut(title, _SIZE, _LEFT - 14), "", "end")
    held = 0
    for holder in use.holders:
        x, end = _x(held, most), _x(held + holder.num_bytes, most)
        if holder.num_bytes:
            tip = f"{holder.title}\n{format_bytes(holder.num_bytes)}"
            yield rect(x, y + 3, end - x, _ROW - 6, f"area {holder.name}", tip, 0)
        held += holder.num_bytes
    label, end = format_bytes(use.peak), _x(held, most)
    room = WIDTH - _RIGHT - end - 6 > text_width(label, _BOLD * _SIZE)
    anchor = "start" if room else "end"
    yield text(end + (6 if room else -6), y + _ROW / 2 + 4, label, "strong halo", anchor)
    if use.limit:
        x = _x(use.limit, most)
        yield line(x, y, x, y + _ROW, "limit")


def _y(num_bytes: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * num_bytes / most


def _axes(end_ns: int, most: float) -> Iterator[Markup]:
    unit = _unit(most)
    for at in ticks(most / unit, 5):
        y = _y(at * unit, most)
        yield line(_FROM, y, WIDTH - _RIGHT, y, "grid")
        yield text(_FROM - 8, y + 4, format_bytes(round(at * unit)), "mute", "end")
    yield from _time_ticks(end_ns, _FROM, _HEIGHT)


def _unit(most: float) -> float:
    """The binary unit in which `most` is a number of at least 1."""
    unit = 1.0
    while most / unit >= 1024:
        unit *= 1024
    return unit


def _area(use: MemoryUse, k: int, end_ns: int, most: float) -> Markup:
    """Holder k's area, down to the bottom: the holders below are drawn over it."""
    top: list[tuple[float, float]] = []
    for column in use.columns:
        y = _y(sum(column.held[: k + 1]), most)
        top += [(_x(column.start_ns, end_ns, _FROM), y), (_x(column.end_ns, end_ns, _FROM), y)]
    bottom = [(_x(end_ns, end_ns, _FROM), _y(0, most)), (_x(0, end_ns, _FROM), _y(0, most))]
    holder = use.holders[k]
    return svg_path(f"M{points(top + bottom)}Z", f"area {holder.name}", holder.title)


def _limit(use: MemoryUse, most: float) -> Iterator[Markup]:
    if use.limit:
        y = _y(use.limit, most)
        yield line(_FROM, y, WIDTH - _RIGHT, y, "limit")
        yield text(WIDTH - _RIGHT, y - 5, f"limit {format_bytes(use.limit)}", "strong", "end")


def _peak(use: MemoryUse, end_ns: int, most: float) -> Iterator[Markup]:
    top = max(use.columns, key=lambda column: column.total)
    x = _x((top.start_ns + top.end_ns) / 2, end_ns, _FROM)
    y = _y(top.total, most)
    yield svg_path(f"M{points([(x, y), (x - 5, y - 8), (x + 5, y - 8)])}Z", "marker")
    label = f"peak {format_bytes(top.total)}"
    near_limit = abs(y - _y(use.limit, most)) < 24
    anchor = "start" if x < WIDTH / 2 else "end"
    yield text(
        x + (10 if anchor == "start" else -10),
        y + 18 if near_limit else y - 5,
        label,
        "strong halo",
        anchor,
    )
