"""Time against memory, as a table and a chart of characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_bytes, format_count, format_ns, format_percent
from autopar.plans.frontier import Frontier
from autopar.plans.plan import Plan
from autopar.report.costs import recompute_ns
from autopar.report.names import escape
from autopar.report.printed import Printed, name, section
from autopar.report.printed import table as new_table
from autopar.report.summary import maker_of

_COLUMNS, _LINES = 64, 10
_NO_PLAN = "no plan"


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a point, per device and step. `ratio` is its step over the one without a limit.
    `num_recomputed` is the number of classes of ops that backward recomputes, in `recompute_ns`."""

    peak_bytes: int
    step_ns: int
    ratio: float
    num_recomputed: int
    recompute_ns: int
    mesh: str
    gap: float
    digest: str


@dataclass(frozen=True, slots=True)
class Rung:
    """A memory limit, and its plan if there is one."""

    limit_bytes: int
    plan: Planned | None


@dataclass(frozen=True, slots=True)
class FrontierSummary(Printed):
    """The content of the page of a frontier; `rungs` by descending limit, `verdict` whether the
    model fits into the `device_bytes` of a device."""

    model: str
    optimizer: str
    inputs: tuple[str, ...]
    cluster: str
    world_size: int
    device_bytes: int
    unlimited: Planned
    smallest_peak_bytes: int
    rungs: tuple[Rung, ...]
    verdict: str
    imposed: tuple[str, ...]
    maker: str

    @property
    def plans(self) -> tuple[Planned, ...]:
        """Those of the rungs, each once, by descending peak."""
        plans = dict.fromkeys(rung.plan for rung in self.rungs if rung.plan is not None)
        return tuple(sorted(plans, key=lambda plan: -plan.peak_bytes))

    def page(self) -> RenderableType:
        sections: list[RenderableType] = [_head(self)]
        limits = new_table((), TITLES, map(cells, self.rungs))
        sections += section("Memory limits, per device", limits)
        if len(self.plans) > 1:
            drawn = Text("\n".join(chart(self.plans, self.device_bytes)), no_wrap=True)
            sections += section("Step against memory", drawn)
        return Group(*sections)


def summarize_frontier(frontier: Frontier) -> FrontierSummary:
    """The figures of a frontier."""
    best = frontier.unlimited
    structure, provenance = best.structure, best.provenance
    step_ns = best.estimates.step_ns
    unlimited = _planned(best, step_ns)
    rungs = tuple(
        Rung(point.limit_bytes, None if point.plan is None else _planned(point.plan, step_ns))
        for point in frontier.points
    )
    return FrontierSummary(
        model=structure.model,
        optimizer=structure.optimizer,
        inputs=structure.inputs,
        cluster=structure.cluster,
        world_size=best.world_size,
        device_bytes=frontier.device_bytes,
        unlimited=unlimited,
        smallest_peak_bytes=frontier.smallest_peak_bytes,
        rungs=rungs,
        verdict=_verdict(frontier, unlimited, rungs),
        imposed=provenance.imposed,
        maker=maker_of(provenance),
    )


def _planned(plan: Plan, unlimited_ns: int) -> Planned:
    structure, estimates = plan.structure, plan.estimates
    count, chunks = structure.microbatches, structure.loss_chunks
    return Planned(
        peak_bytes=estimates.memory.total,
        step_ns=estimates.step_ns,
        ratio=estimates.step_ns / unlimited_ns if unlimited_ns else 1.0,
        num_recomputed=sum(len(stage.recompute) for stage in structure.stages),
        recompute_ns=sum(map(recompute_ns, estimates.stages)),
        mesh=structure.mesh_text
        + (f", {count} microbatches" if count > 1 else "")
        + (f", loss in {chunks} chunks" if chunks > 1 else ""),
        gap=plan.provenance.gap_ppm / 1e6,
        digest=plan.digest,
    )


def _verdict(frontier: Frontier, unlimited: Planned, rungs: Sequence[Rung]) -> str:
    """In words, whether there is a plan within the memory of a device."""
    device = format_bytes(frontier.device_bytes)
    least = f"the smallest-memory plan found peaks at {format_bytes(frontier.smallest_peak_bytes)}"
    plans = [unlimited, *(rung.plan for rung in rungs if rung.plan is not None)]
    within = [plan for plan in plans if plan.peak_bytes <= frontier.device_bytes]
    if within:
        best = min(within, key=lambda plan: plan.step_ns)
        return f"fits into {device} per device, step {best.ratio:.3f} times that without a limit"
    if frontier.smallest_peak_bytes <= frontier.device_bytes:
        return f"fits into {device} per device: {least}"
    return f"does not fit into {device} per device: {least}"


def _head(summary: FrontierSummary) -> RenderableType:
    devices = format_count(summary.world_size, "device")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("model", name(f"{summary.model or '(unnamed)'}, trained with {summary.optimizer}"))
    for given in summary.inputs:
        grid.add_row("input", name(given))
    grid.add_row("cluster", name(f"{summary.cluster}, {devices}"))
    for line in summary.imposed:
        grid.add_row("imposed", name(line))
    grid.add_row("memory", Text(escape(summary.verdict)))
    grid.add_row("planner", name(summary.maker, "dim"))
    return grid


def cells(rung: Rung) -> tuple[str, ...]:
    """The figures of a row: limit, peak, step, ratio, what is recomputed, gap and mesh."""
    plan = rung.plan
    limit = format_bytes(rung.limit_bytes)
    if plan is None:
        return limit, _NO_PLAN, "", "", "", "", ""
    recomputed = f"{plan.num_recomputed} in {format_ns(plan.recompute_ns)}"
    return (
        limit,
        format_bytes(plan.peak_bytes),
        format_ns(plan.step_ns),
        f"{plan.ratio:.3f}",
        recomputed if plan.num_recomputed else "nothing",
        format_percent(plan.gap),
        plan.mesh,
    )


TITLES = ("limit", "peak", "step", "ratio", "recomputed", "gap", "mesh")


def chart(plans: Sequence[Planned], device_bytes: int) -> list[str]:
    """Lines that show the step (upwards) of the best of `plans` within the memory (to the right);
    each plan is a dot. Where the memory of a device lies in between, it is an upright line."""
    least, most = plans[-1].peak_bytes, plans[0].peak_bytes
    short, long = min(p.step_ns for p in plans), max(p.step_ns for p in plans)

    def column(num_bytes: int) -> int:
        return (num_bytes - least) * (_COLUMNS - 1) // max(1, most - least)

    def line(step_ns: int) -> int:
        return (long - step_ns) * (_LINES - 1) // max(1, long - short)

    paper = [[" "] * _COLUMNS for _ in range(_LINES)]
    if least < device_bytes < most:
        for row in paper:
            row[column(device_bytes)] = "│"
    for place in range(_COLUMNS):
        within = [p for p in plans if column(p.peak_bytes) <= place]
        paper[line(min(p.step_ns for p in within))][place] = "·"
    for plan in plans:
        paper[line(plan.step_ns)][column(plan.peak_bytes)] = "●"
    labels = [format_ns(long), *[""] * (_LINES - 2), format_ns(short)]
    width = max(map(len, labels))
    left, right = format_bytes(least), format_bytes(most)
    return [
        *(f"{label:>{width}} ┤{''.join(row)}" for label, row in zip(labels, paper, strict=True)),
        f"{'':>{width}} └{'─' * _COLUMNS}",
        f"{'':>{width}}  {left}{right:>{_COLUMNS - len(left)}}",
    ]
