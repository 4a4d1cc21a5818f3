"""A plan as one HTML page: no file beside it, no network, readable without scripts.

The content is made of frozen values, and its pictures are SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.ir.mesh import Mesh
from autopar.plans.estimates import CollectiveTotal
from autopar.plans.plan import Plan
from autopar.report.critical_parts import CriticalPart, critical_parts
from autopar.report.html.block_graph import BlockGraph, block_graphs
from autopar.report.html.block_picture import block_picture
from autopar.report.html.charts import areas, gantt, memory_bars
from autopar.report.html.decisions import ROW_KINDS, Decisions, decisions
from autopar.report.html.headline import Headline, headline
from autopar.report.html.memory import MemoryUse, memory_use
from autopar.report.html.schedule import DrawnSchedule, Panel, Turn, drawn_schedule
from autopar.report.html.stages import PASS_WORDS, SHARED, stages_part
from autopar.report.html.templates import rendered
from autopar.report.limits import AxisShare, find_limits
from autopar.report.timeline import UPDATE, Track, timeline

NUM_COLOURS = 6
"""Colours of mesh axes in the style sheet; further axes begin again."""

MAX_STAGES = 8
"""Stages whose own content is on the page of all."""


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page says."""

    mesh: Mesh
    headline: Headline
    binds: tuple[str, ...]
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
        binds=limits.binds,
        schedule=drawn_schedule(plan, step),
        critical=critical_parts(plan, step),
        memory=memory_use(plan),
        traffic=axis_traffic(plan, limits.axes),
        graphs=block_graphs(plan),
        decisions=decisions(plan),
    )


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is drawn of a page; `axes` has the colours of mesh axes."""

    axes: Mapping[str, str]
    panels: tuple[tuple[Panel, Markup], ...]
    areas: Markup | None
    graphs: tuple[tuple[BlockGraph, Markup], ...]


def html(plan: Plan) -> bytes:
    """The page of a plan; of one in stages, with what each of them has as a page of its own."""
    text = _stages_page(plan) if plan.structure.stages else render(content(plan))
    return text.encode("utf-8", "backslashreplace")


def render(page: Page) -> str:
    """The text of a page."""
    return rendered("page.html.j2", "page.js", page=page, drawn=_pictures(page), kinds=ROW_KINDS)


def _stages_page(plan: Plan) -> str:
    part = stages_part(plan)
    pages = [content(each) for each in plan.stages[:MAX_STAGES]]
    rows = part.summary.stages[:MAX_STAGES]
    turns = {
        Turn(kind, chunk): kind.name.lower() + (" later" if chunk % 2 else "")
        for kind in part.passes
        for chunk in range(max(len(rank.stages) for rank in part.summary.ranks))
    }
    return rendered(
        "stages.html.j2",
        "page.js",
        part=part,
        picture=gantt(part.panel, {UPDATE: "optimizer", SHARED: "network", **turns}),
        memory=memory_bars([(each.title, each.use) for each in part.memory]),
        passes=[(kind.name.lower(), PASS_WORDS[kind]) for kind in part.passes],
        pages=[(row, page, _pictures(page)) for row, page in zip(rows, pages, strict=True)],
        kinds=ROW_KINDS,
    )


def _pictures(page: Page) -> Pictures:
    axes = {axis.name: f"axis{k % NUM_COLOURS}" for k, axis in enumerate(page.mesh)}
    colours = _track_colours(axes)
    return Pictures(
        axes=axes,
        panels=tuple((panel, gantt(panel, colours)) for panel in page.schedule.panels),
        areas=areas(page.memory) if page.memory.columns else None,
        graphs=tuple((graph, block_picture(graph, page.mesh)) for graph in page.graphs),
    )


def _track_colours(axes: Mapping[str, str]) -> dict[Track | Turn, str]:
    networks: dict[Track | Turn, str] = {
        Track("network", axis): class_ for axis, class_ in axes.items()
    }
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
