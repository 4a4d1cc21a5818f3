"""Time against memory as one HTML page: a picture and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from autopar.ir.units import format_bytes, format_ns
from autopar.report.frontier import TITLES, FrontierSummary, Planned, cells
from autopar.report.html.svg import element, line, picture, points, svg_path, text, title
from autopar.report.html.templates import rendered

_WIDTH, _HEIGHT = 1080.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 40.0, 24.0, 34.0
_TICKS = 5


def frontier_html(summary: FrontierSummary) -> bytes:
    """The page of a frontier."""
    page = rendered(
        "frontier.html.j2",
        "",
        summary=summary,
        titles=TITLES,
        rows=[cells(rung) for rung in summary.rungs],
        picture=_drawn(summary.plans, summary.device_bytes) if summary.plans else None,
    )
    return page.encode("utf-8", "backslashreplace")


def _drawn(plans: Sequence[Planned], device_bytes: int) -> Markup:
    """The step of the best plan within each memory, a dot per plan; memory from 0 on."""
    most = 1.08 * plans[0].peak_bytes
    steps = [plan.step_ns for plan in plans]
    room = (max(steps) - min(steps) or max(steps)) / 10
    shortest, longest = max(0.0, min(steps) - room), max(steps) + room

    def x(num_bytes: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * num_bytes / most

    def y(step_ns: float) -> float:
        high = (step_ns - shortest) / max(1.0, longest - shortest)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * high

    def children() -> Iterator[Markup]:
        for k in range(_TICKS + 1):
            step_ns = shortest + (longest - shortest) * k / _TICKS
            num_bytes = most * k / _TICKS
            yield line(_LEFT, y(step_ns), _WIDTH - _RIGHT, y(step_ns), "grid")
            yield text(_LEFT - 8, y(step_ns) + 4, format_ns(step_ns), "mute", "end")
            yield text(x(num_bytes), _HEIGHT - 10, format_bytes(round(num_bytes)), "mute", "middle")
        if device_bytes < most:
            at = x(device_bytes)
            yield line(at, _TOP - 8, at, y(shortest), "limit")
            yield text(at + 6, _TOP, f"device {format_bytes(device_bytes)}", "mute")
        yield svg_path(f"M{points(_stairs())}", "arrow moved")
        for plan in plans:
            tip = f"{format_bytes(plan.peak_bytes)}\n{format_ns(plan.step_ns)}\nmesh {plan.mesh}"
            where = {"cx": x(plan.peak_bytes), "cy": y(plan.step_ns)}
            yield element("circle", title(tip), r=4.0, class_="marker", **where)

    def _stairs() -> Iterator[tuple[float, float]]:
        best = plans[-1].step_ns
        for plan in reversed(plans):
            yield x(plan.peak_bytes), y(best)
            best = min(best, plan.step_ns)
            yield x(plan.peak_bytes), y(best)
        yield _WIDTH - _RIGHT, y(best)

    return picture(_WIDTH, _HEIGHT, "Step of the best plan within each memory", children())
