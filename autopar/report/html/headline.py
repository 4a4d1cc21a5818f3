"""What stands at the top of the page: the figures of the step, and what they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.units import (
    format_bytes,
    format_bytes_per_s,
    format_ns,
    format_percent,
    format_share,
)
from autopar.plans.cluster_rates import ClusterRates
from autopar.plans.estimates import Estimates
from autopar.plans.plan import Plan
from autopar.report.cautions import cautions
from autopar.report.held import HOST_LABEL, host_use
from autopar.report.limits import Bottlenecks, margin_text
from autopar.report.placed import param_groups
from autopar.report.summary import made_by

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
class Fact:
    """A line of the list below the figures."""

    title: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Headline:
    """The top of the page."""

    model: str
    subtitle: str
    cards: tuple[Card, ...]
    shares: tuple[Share, ...]
    facts: tuple[Fact, ...]
    warnings: tuple[str, ...]


def headline(plan: Plan, limits: Bottlenecks) -> Headline:
    """The headline of a plan that has these limits."""
    structure = plan.structure
    return Headline(
        model=model_title(plan),
        subtitle=f"{devices_text(plan)}: {structure.mesh.text}",
        cards=tuple(_cards(plan, limits)),
        shares=tuple(shares(plan.estimates)),
        facts=_facts(plan, limits),
        warnings=tuple(cautions(plan, param_groups(structure.params, structure.mesh))),
    )


def model_title(plan: Plan) -> str:
    """The name of the model."""
    return plan.structure.model or "(unnamed model)"


def devices_text(plan: Plan) -> str:
    """`2x4xA100, 8 devices`."""
    devices = f"{plan.world_size} device" + ("s" if plan.world_size != 1 else "")
    return f"{plan.structure.cluster}, {devices}"


def shares(estimates: Estimates) -> Iterator[Share]:
    """The parts of a step; of a pipeline's, those of the busiest rank."""
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


def _cards(plan: Plan, limits: Bottlenecks) -> list[Card]:
    estimates, provenance = plan.estimates, plan.provenance
    exposed, hidden = estimates.exposed_communication_ns, estimates.hidden_communication_ns
    return [
        Card("Step", format_ns(estimates.step_ns), ("predicted, of each device",)),
        *speed_cards(estimates),
        Card(
            "Exposed communication",
            format_ns(exposed),
            (
                f"{format_share(exposed, estimates.step_ns)} of the step",
                f"{format_ns(hidden)} more behind compute",
            ),
        ),
        memory_card(plan),
        Card(
            "Proof",
            provenance.status,
            (
                f"bound {format_ns(provenance.bound_ns)}, "
                f"gap {format_percent(provenance.gap_ppm / 1e6)}",
                f"objective {format_ns(provenance.objective_ns)}, as modelled",
            ),
            "good" if provenance.is_proven else "bad",
        ),
        _margin(plan, limits),
    ]


def speed_cards(estimates: Estimates) -> tuple[Card, Card]:
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
            format_percent(estimates.mfu_ppm / 1e6),
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
    estimates, host = plan.estimates, host_use(plan)
    peak, limit = estimates.memory.total, estimates.memory_limit
    notes += () if host is None else (f"{HOST_LABEL}: {host.text}",)
    return Card(
        "Memory at the peak",
        format_bytes(peak),
        (f"of {format_bytes(limit)} ({format_share(peak, limit)})", *notes),
        "bad" if peak > limit else "",
    )


def _margin(plan: Plan, limits: Bottlenecks) -> Card:
    margin, fragile = plan.provenance.margin, plan.provenance.is_fragile
    words = margin_text(limits)
    if margin is None:
        return Card("Margin", UNKNOWN, (words,))
    tone = "" if fragile is None else "bad" if fragile else "good"
    nearest = margin.bound_ns if margin.step_ns is None else margin.step_ns
    objective_ns = max(plan.provenance.objective_ns, 1)
    return Card("Margin", format_share(nearest - objective_ns, objective_ns), (words,), tone)


def _facts(plan: Plan, limits: Bottlenecks) -> tuple[Fact, ...]:
    meshes = plan.provenance.meshes_tried
    return facts(plan, limits.binds, Fact("Best of the meshes", meshes if len(meshes) > 1 else ()))


def facts(plan: Plan, binds: tuple[str, ...], *more: Fact) -> tuple[Fact, ...]:
    """What a plan is for and was made with, what `binds` it, and `more`; none of them empty."""
    structure, provenance = plan.structure, plan.provenance
    found = (
        Fact("Inputs", structure.inputs),
        Fact("Trained with", (structure.optimizer,)),
        Fact("Cluster", _cluster(structure.cluster, plan.estimates.cluster)),
        Fact("What binds", binds),
        Fact("Imposed", provenance.imposed),
        *more,
        Fact("Plan", (plan.digest,)),
        Fact("Made by", (made_by(provenance),)),
    )
    return tuple(fact for fact in found if fact.words)


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
