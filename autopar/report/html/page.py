"""A plan as one HTML page: no file beside it, no network, readable without scripts.

The content is made of frozen values, and its pictures are SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.plans.estimates import CollectiveTotal
from autopar.plans.plan import Plan
from autopar.report.critical_parts import CriticalPart, critical_parts
from autopar.report.html.block_graph import BlockGraph, block_graphs
from autopar.report.html.block_picture import block_picture
from autopar.report.html.charts import areas, gantt
from autopar.report.html.decisions import ROW_KINDS, Decisions, decisions
from autopar.report.html.headline import Headline, headline
from autopar.report.html.memory import MemoryUse, memory_use
from autopar.report.html.schedule import DrawnSchedule, drawn_schedule
from autopar.report.html.templates import rendered
from autopar.report.limits import AxisShare, find_limits
from autopar.report.timeline import Track, timeline

NUM_COLOURS = 6
"""Colours of mesh axes in the style sheet; further axes begin again."""


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page says."""

    mesh: Mesh
    headline: Headline
    schedule: DrawnSchedule
    critical: tuple[CriticalPart, ...]
    memory: MemoryUse
    traffic: tuple[AxisTraffic, ...]
    graphs: tuple[BlockGraph, ...]
    decisions: Decisions


def content(plan: Plan) -> Page:
    """The content of the page of a plan."""
    step = timeline(plan)
    limits = find_limits(plan, step)
    return Page(
        mesh=plan.structure.mesh,
        headline=headline(plan, limits),
        schedule=drawn_schedule(plan, step),
        critical=critical_parts(plan, step),
        memory=memory_use(plan),
        traffic=axis_traffic(plan, limits.axes),
        graphs=block_graphs(plan),
        decisions=decisions(plan),
    )


def html(plan: Plan) -> bytes:
    """The page of a plan."""
    return render(content(plan)).encode("utf-8", "backslashreplace")


def render(page: Page) -> str:
    """The text of a page."""
    axes = {axis.name: f"axis{k % NUM_COLOURS}" for k, axis in enumerate(page.mesh)}
    colours = _track_colours(axes)
    return rendered(
        "page.html.j2",
        "page.js",
        page=page,
        kinds=ROW_KINDS,
        axes=axes,
        panels=[(panel, gantt(panel, colours)) for panel in page.schedule.panels],
        areas=areas(page.memory) if page.memory.columns else None,
        graphs=[(graph, block_picture(graph, page.mesh)) for graph in page.graphs],
    )


def _track_colours(axes: Mapping[str, str]) -> dict[Track, str]:
    networks = {Track("network", axis): class_ for axis, class_ in axes.items()}
    return networks | {Track("compute"): "compute", Track("optimizer"): "optimizer"}


@dataclass(frozen=True, slots=True)
class SentRow:
    """All collectives of a kind, axis and phase; `share` is of the longest of all axes."""

    total: CollectiveTotal
    share: float


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """What one axis, of `size` ranks, sends in all; and by kind and phase, the longest first."""

    total: AxisShare
    size: int
    num_bytes: int
    rows: tuple[SentRow, ...]


def axis_traffic(plan: Plan, shares: Sequence[AxisShare]) -> tuple[AxisTraffic, ...]:
    """The traffic of every axis of the mesh, in its order, also of those that send nothing."""
    totals = plan.estimates.collectives
    longest = max((total.time_ns for total in totals), default=0) or 1
    sizes = {axis.name: axis.size for axis in plan.structure.mesh}
    places = {name: place for place, name in enumerate(sizes)}
    found: list[AxisTraffic] = []
    for share in sorted(shares, key=lambda each: (places.get(each.axis, len(places)), each.axis)):
        of_axis = [total for total in totals if total.axis == share.axis]
        of_axis.sort(key=lambda total: (-total.time_ns, total.kind, total.phase))
        rows = tuple(SentRow(total, total.time_ns / longest) for total in of_axis)
        num_bytes = sum(total.num_bytes for total in of_axis)
        found.append(AxisTraffic(share, sizes.get(share.axis, 0), num_bytes, rows))
    return tuple(found)
