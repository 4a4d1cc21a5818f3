"""What stands at the top of the page: the figures of the step, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.grouping import grouped
from autopar.ir.units import (
    format_bytes,
    format_bytes_per_s,
    format_count,
    format_ns,
    format_ppm,
    format_share,
)
from autopar.plans.cluster_rates import ClusterRates
from autopar.plans.estimates import Figures
from autopar.plans.plan import Plan
from autopar.report.cautions import cautions, gap_text, searched_lines
from autopar.report.costs import HOST_LABEL, host_use
from autopar.report.limits import Bottlenecks, margin_text
from autopar.report.names import stages_text
from autopar.report.pipeline import PipelineContent
from autopar.report.summary import maker_of

UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Card:
    """A figure, and what there is to say of it in a line or two. `tone` is good, bad or empty."""

    title: str
    figure: str
    notes: tuple[str, ...]
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the step, from `start` percent on for `width` percent; `class_` is its colour."""

    title: str
    ns: int
    class_: str
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class Headline:
    """The top of the page; `facts` are lines of the list below the figures, by title."""

    model: str
    subtitle: str
    cards: tuple[Card, ...]
    shares: tuple[Share, ...]
    facts: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]


def headline(plan: Plan, pipeline: PipelineContent | None, limits: Bottlenecks | None) -> Headline:
    """The headline of a plan; `limits` are those of its only stage, `pipeline` is of several."""
    structure = plan.structure
    binds: tuple[str, ...] = pipeline.binds if pipeline else limits.binds if limits else ()
    devices = format_count(plan.world_size, "device")
    where = structure.mesh_text if pipeline is None else f"{len(pipeline.stages)} stages"
    return Headline(
        model=structure.model or "(unnamed model)",
        subtitle=f"{structure.cluster}, {devices}: {where}",
        cards=tuple(_cards(plan, pipeline, limits)),
        shares=tuple(shares(plan.estimates)),
        facts={title: words for title, words in _facts(plan, pipeline, binds) if words},
        warnings=tuple(cautions(plan)),
    )


def shares(estimates: Figures) -> Iterator[Share]:
    """The parts of a step, or of a stage's; of a pipeline's, those of the busiest rank."""
    parts = (
        ("compute", estimates.compute_ns, "compute"),
        ("exposed communication", estimates.exposed_communication_ns, "network"),
        ("optimizer", estimates.optimizer_ns, "optimizer"),
        ("waiting for the host", estimates.exposed_host_ns, "other"),
        ("waiting for other stages", estimates.bubble_ns, "bubble"),
    )
    whole, done = sum(ns for _, ns, _ in parts), 0
    for title, ns, class_ in parts:
        if ns:
            yield Share(title, ns, class_, 100 * done / whole, 100 * ns / whole)
            done += ns


def _cards(
    plan: Plan, pipeline: PipelineContent | None, limits: Bottlenecks | None
) -> Iterator[Card]:
    estimates = plan.estimates
    exposed, hidden = estimates.exposed_communication_ns, estimates.hidden_communication_ns
    of_what = "of each device" if pipeline is None else "of all stages together"
    yield Card("Step", format_ns(estimates.step_ns), (f"predicted, {of_what}",))
    yield from speed_cards(estimates)
    yield Card(
        "Exposed communication",
        format_ns(exposed),
        (
            f"{format_share(exposed, estimates.step_ns)} of the step",
            f"{format_ns(hidden)} more behind compute",
        ),
    )
    if pipeline is None:
        yield memory_card(plan)
    else:
        yield from _pipeline_cards(plan, pipeline)
    yield _proof(plan, is_of_cuts=pipeline is not None)
    if limits is not None or plan.provenance.margin is not None:
        yield _margin(plan)


def _pipeline_cards(plan: Plan, pipeline: PipelineContent) -> Iterator[Card]:
    structure, estimates = plan.structure, plan.estimates
    ranks = format_count(len(pipeline.ranks), "rank")
    yield Card(
        "Schedule",
        structure.schedule,
        (f"{len(pipeline.stages)} stages on {ranks}", f"{structure.microbatches} microbatches"),
    )
    yield Card(
        "Bubble of the busiest rank",
        format_share(estimates.bubble_ns, max(1, estimates.step_ns)),
        (f"{format_ns(estimates.bubble_ns)} of the step",),
    )
    fullest = max(pipeline.ranks, key=lambda row: (row.memory.total, -row.rank))
    yield memory_card(plan, f"{stages_text(fullest.stages)}, the fullest")


def _proof(plan: Plan, *, is_of_cuts: bool) -> Card:
    """How good the plan, or of a pipeline its cuts, are known to be."""
    provenance, title = plan.provenance, "Cuts" if is_of_cuts else "Proof"
    if is_of_cuts and not provenance.bound_ns:
        return Card(title, "as given", ("others were not looked at",))
    notes = (
        gap_text(provenance.bound_ns, provenance.gap_ppm / 1e6, is_limited=provenance.is_limited),
        f"objective {format_ns(provenance.objective_ns)}, as modelled"
        + ", of the times of segments under one plan of the whole model" * is_of_cuts,
    )
    tone = "good" if provenance.is_proven else "" if provenance.is_close else "bad"
    return Card(title, provenance.status, notes, tone)


def speed_cards(estimates: Figures) -> tuple[Card, Card]:
    """Tokens or samples per second, and the share of the devices' peak rate."""
    unit = "tokens" if estimates.tokens else "samples"
    count = estimates.tokens or estimates.samples
    rate = (
        (f"{estimates.tokens_per_s or estimates.samples_per_s:,}", f"{count:,} {unit} a step")
        if count
        else (UNKNOWN, "the plan does not say how many samples a step has")
    )
    mfu = (
        (
            format_ppm(estimates.mfu_ppm),
            f"{_flop(estimates.flops)} a step on all devices",
        )
        if estimates.mfu_ppm
        else (UNKNOWN, "the plan does not have the peak rates of its devices")
    )
    return (
        Card(f"{unit.capitalize()} per second", rate[0], rate[1:]),
        Card("Model FLOPs utilisation", mfu[0], mfu[1:]),
    )


def memory_card(plan: Plan, *notes: str) -> Card:
    """The peak, against the limit, and what is on the host."""
    estimates, host = plan.estimates, host_use(plan.estimates, plan)
    peak, limit = estimates.memory.total, estimates.memory_limit
    notes += () if host is None else (f"{HOST_LABEL}: {host.text}",)
    return Card(
        "Memory at the peak",
        format_bytes(peak),
        (f"of {format_bytes(limit)} ({format_share(peak, limit)})", *notes),
        "bad" if peak > limit else "",
    )


def _margin(plan: Plan) -> Card:
    margin, fragile = plan.provenance.margin, plan.provenance.is_fragile
    words = margin_text(plan.provenance)
    if margin is None:
        return Card("Margin", UNKNOWN, (words,))
    tone = "" if fragile is None else "bad" if fragile else "good"
    nearest = margin.bound_ns if margin.step_ns is None else margin.step_ns
    objective_ns = max(plan.provenance.objective_ns, 1)
    # A rival below the objective is no better: its simulated step is longer.
    margin_ns = max(0, nearest - objective_ns)
    return Card("Margin", format_share(margin_ns, objective_ns), (words,), tone)


def _facts(
    plan: Plan, pipeline: PipelineContent | None, binds: tuple[str, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a plan is for and was made with, and what `binds` it."""
    structure, provenance = plan.structure, plan.provenance
    return (
        ("Inputs", structure.inputs),
        ("Trained with", (structure.optimizer,)),
        ("Cluster", _cluster(structure.cluster, plan.estimates.cluster)),
        ("What binds", binds),
        ("Imposed", provenance.imposed),
        ("Mesh of a stage", () if pipeline is None else _meshes(pipeline)),
        ("Candidates", tuple(searched_lines(provenance))),
        ("Plan", (plan.digest,)),
        ("Planner", (maker_of(provenance),)),
    )


def _meshes(pipeline: PipelineContent) -> tuple[str, ...]:
    by_mesh = grouped((row.mesh or "one device", row.stage) for row in pipeline.stages)
    return tuple(f"{mesh}: {stages_text(stages)}" for mesh, stages in by_mesh.items())


def _cluster(name: str, rates: ClusterRates) -> tuple[str, ...]:
    device = (
        f"{rates.device}: {format_bytes(rates.memory_bytes)} at "
        f"{format_bytes_per_s(rates.memory_bytes_per_s)}"
    )
    flops = "; ".join(
        f"{dtype} {rate / 1e12:.4g} TFLOP/s" for dtype, rate in sorted(rates.flops_per_s.items())
    )
    links = tuple(
        f"{link.name} joins {link.size} at {format_bytes_per_s(link.bytes_per_s)}, "
        + ("collectives as measured" if link.measured else f"latency {format_ns(link.latency_ns)}")
        for link in rates.links
    )
    return (name, device, flops, *links, f"figures from {rates.source}")


def _flop(number: int) -> str:
    """`321 PFLOP`."""
    power = min(max(len(str(number)) - 1, 0) // 3, 6)
    return f"{number / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"
