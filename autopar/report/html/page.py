"""A plan as one HTML page: no file beside it, no network, readable without scripts.

The content is made of frozen values, and its pictures are SVG.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.ir.mesh import Mesh
from autopar.plans.estimates import CollectiveTotal
from autopar.plans.plan import Plan, StagePlan
from autopar.report.costs import Cost
from autopar.report.html.block_graph import BlockGraph, block_graphs
from autopar.report.html.block_picture import block_picture
from autopar.report.html.charts import areas, gantt, memory_bars
from autopar.report.html.decisions import ROW_KINDS, DecisionRow, decisions
from autopar.report.html.headline import Headline, Share, headline, shares
from autopar.report.html.memory import MemoryUse, memory_use
from autopar.report.html.pipeline_part import PASS_WORDS, SHARED, PipelinePart, pipeline_part
from autopar.report.html.schedule import ActionTrack, DrawnSchedule, Panel, drawn_schedule
from autopar.report.html.templates import rendered
from autopar.report.limits import AxisShare, Bottlenecks, find_limits
from autopar.report.pipeline import StageRow, pipeline_content
from autopar.report.stage_content import critical_parts
from autopar.report.timeline import COMPUTE, UPDATE, DrawnStep, Track, timeline

NUM_COLOURS = 6
"""Colours of mesh axes in the style sheet; further axes reuse them in order."""

MAX_STAGES = 8
"""Stages whose own content is on the page of all."""


@dataclass(frozen=True, slots=True)
class StagePage:
    """All that the page says of one stage; `row` is what the table of several says of it."""

    number: int
    row: StageRow | None
    shares: tuple[Share, ...]
    mesh: Mesh
    binds: tuple[str, ...]
    schedule: DrawnSchedule
    critical: tuple[Cost, ...]
    memory: MemoryUse
    traffic: tuple[AxisTraffic, ...]
    graphs: tuple[BlockGraph, ...]
    decisions: tuple[DecisionRow, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page says; of many stages, it has not all."""

    headline: Headline
    pipeline: PipelinePart | None
    stages: tuple[StagePage, ...]


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is drawn of a stage; `axes` has the colours of mesh axes."""

    axes: Mapping[str, str]
    panels: tuple[tuple[Panel, Markup], ...]
    areas: Markup | None
    graphs: tuple[tuple[BlockGraph, Markup], ...]


def content(plan: Plan, stage: int | None = None) -> Page:
    """The content of the page of a plan, or of a stage of it alone."""
    pipeline = pipeline_content(plan)
    numbers = range(min(MAX_STAGES, len(plan.stages))) if stage is None else (stage,)
    rows = pipeline.stages if pipeline is not None else (None,)
    steps = [timeline(plan.stages[k]) for k in numbers]
    limits = [find_limits(plan.stages[k], step) for k, step in zip(numbers, steps, strict=True)]
    whole = pipeline if stage is None else None
    return Page(
        headline(plan, pipeline, limits[0] if whole is None else None),
        None if whole is None else pipeline_part(plan, whole),
        tuple(
            _stage_page(plan.stages[k], rows[k], step, bottlenecks)
            for k, step, bottlenecks in zip(numbers, steps, limits, strict=True)
        ),
    )


def _stage_page(
    plan: StagePlan, row: StageRow | None, step: DrawnStep, limits: Bottlenecks
) -> StagePage:
    return StagePage(
        number=plan.number,
        row=row,
        shares=tuple(shares(plan.estimates)),
        mesh=plan.structure.mesh,
        binds=limits.binds,
        schedule=drawn_schedule(plan, step),
        critical=critical_parts(plan, step),
        memory=memory_use(plan),
        traffic=tuple(axis_traffic(plan, limits.axes)),
        graphs=block_graphs(plan),
        decisions=decisions(plan),
    )


def html(plan: Plan, stage: int | None = None) -> bytes:
    """The page of a plan, or of a stage of it alone."""
    return render(content(plan, stage)).encode("utf-8", "backslashreplace")


def render(page: Page) -> str:
    """The text of a page."""
    return rendered(
        "page.html.j2",
        "page.js",
        page=page,
        stages=[(each, _pictures(each)) for each in page.stages],
        drawn=_pipeline_pictures(page.pipeline) if page.pipeline is not None else None,
        kinds=ROW_KINDS,
    )


@dataclass(frozen=True, slots=True)
class PipelinePictures:
    """What is drawn of all stages together; `passes` are the classes of bars with their words."""

    step: Markup
    memory: Markup
    passes: tuple[tuple[str, str], ...]


def _pipeline_pictures(part: PipelinePart) -> PipelinePictures:
    microbatches = {
        ActionTrack(kind, chunk): kind.name.lower() + (" later" if chunk % 2 else "")
        for kind in part.passes
        for chunk in range(max(len(rank.stages) for rank in part.content.ranks))
    }
    return PipelinePictures(
        gantt(part.panel, {UPDATE: "optimizer", SHARED: "network", **microbatches}),
        memory_bars(part.memory),
        tuple((kind.name.lower(), PASS_WORDS[kind]) for kind in part.passes),
    )


def _pictures(page: StagePage) -> Pictures:
    axes = {axis.name: f"axis{k % NUM_COLOURS}" for k, axis in enumerate(page.mesh)}
    colours: dict[Track | ActionTrack, str] = {COMPUTE: "compute", UPDATE: "optimizer"}
    colours |= {Track("network", axis): class_ for axis, class_ in axes.items()}
    return Pictures(
        axes=axes,
        panels=tuple((panel, gantt(panel, colours)) for panel in page.schedule.panels),
        areas=areas(page.memory) if page.memory.columns else None,
        graphs=tuple((graph, block_picture(graph, page.mesh)) for graph in page.graphs),
    )


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """What one axis, of `size` ranks, sends in all; and by kind and phase, the longest first, of
    which that of all axes takes `longest_ns`."""

    total: AxisShare
    size: int
    num_bytes: int
    rows: tuple[CollectiveTotal, ...]
    longest_ns: int


def axis_traffic(plan: StagePlan, shares: Sequence[AxisShare]) -> Iterator[AxisTraffic]:
    """The traffic of every axis of the mesh, in its order, also of axes that send nothing."""
    totals = plan.estimates.collectives
    longest = max((total.time_ns for total in totals), default=0) or 1
    sizes = {axis.name: axis.size for axis in plan.structure.mesh}
    places = {name: place for place, name in enumerate(sizes)}

    for share in sorted(shares, key=lambda each: (places.get(each.axis, len(places)), each.axis)):
        of_axis = [total for total in totals if total.axis == share.axis]
        of_axis.sort(key=lambda total: (-total.time_ns, total.kind, total.phase))
        num_bytes = sum(total.num_bytes for total in of_axis)
        yield AxisTraffic(share, sizes.get(share.axis, 0), num_bytes, tuple(of_axis), longest)
