"""Which limit binds a plan: memory, compute or a link; and how far the next best plan is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from autopar.ir.units import format_bytes_of, format_ns, format_percent
from autopar.plans.cluster_rates import LinkRates
from autopar.plans.plan import Plan

SHORT = 0.9
"""Memory is short where the peak takes this share of the limit: activations and shards come in
steps of some percent, so that less is seldom left for want of a use for it."""


@dataclass(frozen=True, slots=True)
class AxisShare:
    """What is sent over one mesh axis: time of all of it, and the fraction of the step for which
    that keeps its links busy; `link` is the slowest it crosses, empty where that is not known."""

    axis: str
    link: str
    time_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Bottlenecks:
    """What a step is bound by: `binds` has the words for it, `axes` the traffic, the most first.
    Shares are of the step as it is played; communication is what is exposed of it.

    As modelled, the plan takes `objective_ns`, the best one known of another structure,
    `rival`, takes `rival_ns`, and none of those beats `rival_bound_ns` (None where that was not
    asked for). `is_fragile` is None where it is not known.
    """

    memory_bytes: int
    memory_limit_bytes: int
    is_memory_short: bool
    compute_share: float
    communication_share: float
    optimizer_share: float
    axes: tuple[AxisShare, ...]
    binds: tuple[str, ...]
    objective_ns: int
    rival_ns: int | None
    rival_bound_ns: int | None
    rival: str
    is_fragile: bool | None


def find_limits(plan: Plan) -> Bottlenecks:
    """The limits of a plan, from its own figures."""
    estimates, provenance = plan.estimates, plan.provenance
    step_ns = max(1, estimates.step_ns)
    margin = provenance.margin
    peak, limit = estimates.memory.total, estimates.memory_limit
    axes = _axes(plan)
    compute = estimates.compute_ns / step_ns
    communication = estimates.exposed_communication_ns / step_ns
    optimizer = estimates.optimizer_ns / step_ns
    is_short = peak >= SHORT * limit
    return Bottlenecks(
        memory_bytes=peak,
        memory_limit_bytes=limit,
        is_memory_short=is_short,
        compute_share=compute,
        communication_share=communication,
        optimizer_share=optimizer,
        axes=axes,
        binds=(_memory(peak, limit, is_short), _time(compute, communication, optimizer, axes)),
        objective_ns=provenance.objective_ns,
        rival_ns=None if margin is None else margin.step_ns,
        rival_bound_ns=None if margin is None else margin.bound_ns,
        rival="" if margin is None else margin.rival,
        is_fragile=provenance.is_fragile,
    )


def margin_text(limits: Bottlenecks) -> str:
    """A sentence on the best plan of another structure."""
    bound, own_ns = limits.rival_bound_ns, limits.objective_ns
    if bound is None:
        return "not in the plan: it was not asked for, or no plan of another structure is known"
    if limits.rival_ns is None:
        return f"as modelled, a plan of another structure takes at least {_more(bound, own_ns)}"
    text = (
        "as modelled, the best plan known of another structure takes "
        f"{_more(limits.rival_ns, own_ns)}"
    )
    if bound < limits.rival_ns:
        text += f", and none less than {_more(bound, own_ns)}"
    return f"{text}: {limits.rival}"


def _more(ns: int, own_ns: int) -> str:
    more = 100 * (ns - own_ns) / max(1, own_ns)
    return f"{format_ns(ns)} ({more:+.3g} %)"


def _memory(peak: int, limit: int, is_short: bool) -> str:
    short = "short" if is_short else "not short"
    return f"memory is {short}: the peak is {format_bytes_of(peak, limit)}"


def _time(
    compute: float, communication: float, optimizer: float, axes: tuple[AxisShare, ...]
) -> str:
    shares = {
        "compute": compute,
        "exposed communication": communication,
        "the optimizer": optimizer,
    }
    ordered = sorted(shares, key=lambda name: (-shares[name], name))
    words = ", ".join(f"{name} {format_percent(shares[name])}" for name in ordered)
    text = f"{ordered[0]} dominates the step: {words}"
    if axes and axes[0].time_ns:
        first = axes[0]
        over = f"{first.axis} ({first.link})" if first.link else first.axis
        text += f"; the busiest axis is {over}, for {format_percent(first.share)} of the step"
    return text


def _axes(plan: Plan) -> tuple[AxisShare, ...]:
    times = Counter({axis.name: 0 for axis in plan.structure.mesh})
    for total in plan.estimates.collectives:
        times[total.axis] += total.time_ns
    links = _links(plan)
    step_ns = max(1, plan.estimates.step_ns)
    ordered = sorted(times, key=lambda name: (-times[name], name))
    return tuple(
        AxisShare(name, links.get(name, ""), times[name], times[name] / step_ns) for name in ordered
    )


def _links(plan: Plan) -> dict[str, str]:
    """The slowest link that each axis crosses, as `mesh_shapes` lays axes over the levels of a
    cluster."""
    found: dict[str, str] = {}
    for k, axis in enumerate(plan.structure.mesh):
        stride = prod(plan.structure.mesh.sizes[k + 1 :])
        block = plan.world_size
        crossed: list[LinkRates] = []
        for link in plan.estimates.cluster.links:
            extent, block = block, max(1, block // max(1, link.size))
            if link.size > 1 and block % (stride * axis.size) and stride % extent:
                crossed.append(link)
        if crossed:
            found[axis.name] = min(crossed, key=lambda link: link.bytes_per_s).name
    return found
