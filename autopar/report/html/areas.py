"""The picture of memory over time: stacked areas against the limit."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from autopar.ir.units import format_bytes, format_ns
from autopar.report.html.gantt import WIDTH
from autopar.report.html.memory import MemoryUse
from autopar.report.html.svg import line, path, picture, points, text, ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 14, 22, 26
_HEIGHT = 320


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


def _x(ns: float, end_ns: int) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * ns / end_ns


def _y(num_bytes: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * num_bytes / most


def _axes(end_ns: int, most: float) -> Iterator[Markup]:
    unit = _unit(most)
    for at in ticks(most / unit, 5):
        y = _y(at * unit, most)
        yield line(_LEFT, y, WIDTH - _RIGHT, y, "grid")
        yield text(_LEFT - 8, y + 4, format_bytes(round(at * unit)), "mute", "end")
    for at in ticks(end_ns):
        x = _x(at, end_ns)
        anchor = "end" if x > WIDTH - 40 else "middle"
        label = format_ns(at) if at else "0"
        yield text(min(x, WIDTH - 4), _HEIGHT - 8, label, "mute", anchor)


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
        top += [(_x(column.start_ns, end_ns), y), (_x(column.end_ns, end_ns), y)]
    bottom = [(_x(end_ns, end_ns), _y(0, most)), (_x(0, end_ns), _y(0, most))]
    holder = use.holders[k]
    return path(f"M{points(top + bottom)}Z", f"area {holder.name}", holder.title)


def _limit(use: MemoryUse, most: float) -> Iterator[Markup]:
    if use.limit:
        y = _y(use.limit, most)
        yield line(_LEFT, y, WIDTH - _RIGHT, y, "limit")
        yield text(WIDTH - _RIGHT, y - 5, f"limit {format_bytes(use.limit)}", "strong", "end")


def _peak(use: MemoryUse, end_ns: int, most: float) -> Iterator[Markup]:
    top = max(use.columns, key=lambda column: column.total)
    x = _x((top.start_ns + top.end_ns) / 2, end_ns)
    y = _y(top.total, most)
    yield path(f"M{points([(x, y), (x - 5, y - 8), (x + 5, y - 8)])}Z", "marker")
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
