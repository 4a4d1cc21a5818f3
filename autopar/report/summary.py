"""The content of every report of a plan, and its page: what was chosen, what it is predicted to
cost, and how good it is proven to be.

Figures are per device and per training step, of a pipeline those of the rank that is busiest. Rows
are ordered by what they cost, then by name, so that the same plan always gives the same page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.mesh import NO_AXES
from autopar.ir.units import format_bytes_of, format_count, format_ns, format_percent
from autopar.plans.estimates import Memory
from autopar.plans.plan import Plan, stage_of
from autopar.plans.provenance import CLOSE, LIMITED, PROVEN, CandidateOutcome, Provenance
from autopar.report.cautions import cautions, gap_text, searched_text
from autopar.report.costs import HOST_LABEL, HostUse, host_table, host_use
from autopar.report.limits import find_limits, margin_text
from autopar.report.names import escape
from autopar.report.pipeline import PipelineContent, pipeline_content
from autopar.report.printed import Printed, name, section
from autopar.report.stage_content import StageContent, stage_content
from autopar.report.timeline import timeline

MAX_SENTENCE = 600

_ALWAYS_SHOWN = "compute", "exposed communication", "optimizer"


@dataclass(frozen=True, slots=True)
class Summary(Printed):
    """The content of the page. `gap` and `utilisation` are fractions; `warnings` are sentences.
    `pipeline` is None where there is one stage, `stage` where there are several and none of them
    was chosen."""

    model: str
    cluster: str
    mesh: str
    world_size: int
    optimizer: str
    inputs: tuple[str, ...]
    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_communication_ns: int
    hidden_communication_ns: int
    exposed_host_ns: int
    optimizer_ns: int
    bubble_ns: int
    flops: int
    tokens_per_s: int
    samples_per_s: int
    utilisation: float
    status: str
    objective_ns: int
    bound_ns: int
    gap: float
    margin: str
    candidates: tuple[CandidateOutcome, ...]
    searched: str
    imposed: tuple[str, ...]
    schedule: str
    microbatches: int
    loss_chunks: int
    memory: Memory
    memory_bytes: int
    memory_limit_bytes: int
    host: HostUse | None
    pipeline: PipelineContent | None
    stage: StageContent | None
    warnings: tuple[str, ...]
    digest: str
    maker: str

    def page(self) -> RenderableType:
        sections: list[RenderableType] = [_head(self)]
        for part in (self.pipeline, self.stage):
            for title, content in () if part is None else part.sections():
                sections += section(title, content)
        if self.host is not None:
            sections += section(self.host.title, host_table(self.host))
        sections += [Text("")] * bool(self.warnings)
        sections += [Text("warning: ", "yellow").append_text(name(w)) for w in self.warnings]
        return Group(*sections)


def summarize(plan: Plan, stage: int | None = None) -> Summary:
    """The summary of a plan, with all of the `stage` that is chosen, or of the only one. PlanError
    if there is no such stage."""
    structure, estimates, provenance = plan.structure, plan.estimates, plan.provenance
    content, pipeline = None, pipeline_content(plan)
    if stage is not None or pipeline is None:
        stage_plan = stage_of(plan, stage)
        step = timeline(stage_plan)
        content = stage_content(stage_plan, step, find_limits(stage_plan, step))
    return Summary(
        model=structure.model,
        cluster=structure.cluster,
        mesh=structure.mesh_text,
        world_size=plan.world_size,
        optimizer=structure.optimizer,
        inputs=structure.inputs,
        step_ns=estimates.step_ns,
        compute_ns=estimates.compute_ns,
        communication_ns=estimates.communication_ns,
        exposed_communication_ns=estimates.exposed_communication_ns,
        hidden_communication_ns=estimates.hidden_communication_ns,
        exposed_host_ns=estimates.exposed_host_ns,
        optimizer_ns=estimates.optimizer_ns,
        bubble_ns=estimates.bubble_ns,
        flops=estimates.flops,
        tokens_per_s=estimates.tokens_per_s,
        samples_per_s=estimates.samples_per_s,
        utilisation=estimates.mfu_ppm / 1e6,
        status=provenance.status,
        objective_ns=provenance.objective_ns,
        bound_ns=provenance.bound_ns,
        gap=provenance.gap_ppm / 1e6,
        margin=margin_text(provenance) if provenance.margin else "",
        candidates=provenance.candidates,
        searched=searched_text(provenance),
        imposed=provenance.imposed,
        schedule=structure.schedule,
        microbatches=structure.microbatches,
        loss_chunks=structure.loss_chunks,
        memory=estimates.memory,
        memory_bytes=estimates.memory.total,
        memory_limit_bytes=estimates.memory_limit,
        host=host_use(estimates, plan),
        pipeline=pipeline,
        stage=content,
        warnings=tuple(cautions(plan)),
        digest=plan.digest,
        maker=maker_of(provenance),
    )


def maker_of(provenance: Provenance) -> str:
    """Which versions made a plan."""
    return f"autopar {provenance.autopar}, torch {provenance.torch}, {provenance.solver}"


def _head(summary: Summary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for title, line in _lines(summary):
        grid.add_row(title, line)
    return grid


def _lines(summary: Summary) -> Iterator[tuple[str, Text | str]]:
    devices = format_count(summary.world_size, "device")
    pipeline, mesh = summary.pipeline, ""
    if pipeline is None and summary.mesh != NO_AXES:
        mesh = f": {summary.mesh}"
    yield "model", name(f"{summary.model or '(unnamed)'}, trained with {summary.optimizer}")
    yield from (("input", name(given)) for given in summary.inputs)
    yield "cluster", name(f"{summary.cluster}, {devices}{mesh}")
    yield from (("imposed", name(line)) for line in summary.imposed)
    if pipeline is not None:
        order = f"{summary.schedule} of {summary.microbatches} microbatches"
        yield "pipeline", f"{len(pipeline.stages)} stages, {order}"
    yield "step", _step(summary)
    if summary.utilisation:
        yield "speed", _speed(summary)
    yield "memory", format_bytes_of(summary.memory_bytes, summary.memory_limit_bytes)
    if summary.host is not None:
        yield HOST_LABEL, summary.host.text
    if pipeline is not None:
        yield "binds", pipeline.binds[0]
    if summary.loss_chunks > 1:
        yield "loss", f"in {summary.loss_chunks} chunks of a device's rows, one at a time"
    if summary.microbatches > 1 and pipeline is None:
        yield "batch", f"in {summary.microbatches} microbatches, one after the other"
    if summary.stage is not None:
        yield from ((title, name(line)) for title, line in summary.stage.lines())
    yield from _proof(summary)
    if summary.margin:
        yield "margin", Text(escape(summary.margin[:MAX_SENTENCE]))
    if summary.searched:
        yield "search", name(summary.searched)
    yield "plan", name(f"{summary.digest} ({summary.maker})", "dim")


def _proof(summary: Summary) -> Iterator[tuple[str, Text]]:
    is_limited = summary.status == LIMITED
    tone = "default" if summary.gap <= CLOSE else "yellow"
    tone = "green" if summary.gap <= PROVEN and not is_limited else tone
    proof = name(summary.status, tone)
    bound = gap_text(summary.bound_ns, summary.gap, is_limited=is_limited)
    text = f": {format_ns(summary.objective_ns)} as modelled, {bound}"
    if summary.pipeline is None:
        yield "proof", proof.append(text, style="default")
    elif summary.bound_ns:
        text = f"{text}, of the times of segments under one plan of the whole model"
        yield "cuts", proof.append(text, style="default")


def _speed(summary: Summary) -> str:
    unit = "tokens" if summary.tokens_per_s else "samples"
    per_s = summary.tokens_per_s or summary.samples_per_s
    rate = f"{per_s:,} {unit}/s, " if per_s else ""
    return f"{rate}{format_percent(summary.utilisation)} of the devices' peak FLOP/s"


def _step(summary: Summary) -> str:
    parts = [
        f"{what} {format_ns(ns)}"
        for what, ns in (
            ("compute", summary.compute_ns),
            ("exposed communication", summary.exposed_communication_ns),
            ("optimizer", summary.optimizer_ns),
            ("waiting for the host", summary.exposed_host_ns),
            ("waiting for other stages", summary.bubble_ns),
            ("hidden communication", summary.hidden_communication_ns),
        )
        if ns or what in _ALWAYS_SHOWN
    ]
    return f"{format_ns(summary.step_ns)}: {', '.join(parts)}"
