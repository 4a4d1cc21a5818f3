"""Which limit binds a plan: memory, compute or a link; and how far the next best plan is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.hardware import AxisTime, apportion
from autopar.ir.units import format_bytes_of, format_ns, format_percent, format_share
from autopar.plans.plan import StagePlan
from autopar.plans.provenance import Provenance
from autopar.report.placed import slowest_links
from autopar.report.timeline import DrawnStep

SHORT = 0.9
"""Memory is short if the peak takes this share of the limit. Activations and shards come in steps
of some percent: if less is left, it is seldom because nothing could use it."""

_HOST = "waiting for the host"


@dataclass(frozen=True, slots=True)
class AxisShare:
    """The communication on one mesh axis: its time, which is the fraction `share` of the step, how
    much of it is exposed, and how much is hidden. `link` is the slowest link that the axis crosses,
    empty if it is not known."""

    axis: str
    link: str
    time_ns: int
    share: float
    exposed_ns: int
    hidden_ns: int


@dataclass(frozen=True, slots=True)
class Bottlenecks:
    """What limits a step: `binds` says it in words, `axes` has the traffic, the most first. Shares
    are of the step as simulated. Of communication only what is exposed counts, and of the host what
    the device waits for it."""

    memory_bytes: int
    memory_limit_bytes: int
    is_memory_short: bool
    compute_share: float
    communication_share: float
    optimizer_share: float
    host_share: float
    axes: tuple[AxisShare, ...]
    binds: tuple[str, ...]


def find_limits(plan: StagePlan, step: DrawnStep) -> Bottlenecks:
    """The limits of a plan whose step is drawn as `step`, from its own figures."""
    estimates = plan.estimates
    step_ns = max(1, estimates.step_ns)
    peak, limit = estimates.memory.total, estimates.memory_limit
    axes, is_short = _axes(plan, step), peak >= SHORT * limit
    shares = {
        "compute": estimates.compute_ns / step_ns,
        "exposed communication": estimates.exposed_communication_ns / step_ns,
        "the optimizer": estimates.optimizer_ns / step_ns,
        _HOST: estimates.exposed_host_ns / step_ns,
    }
    short = "short" if is_short else "not short"
    memory = f"memory is {short}: the peak is {format_bytes_of(peak, limit)}"
    binds = memory, _time(shares, axes)
    return Bottlenecks(peak, limit, is_short, *shares.values(), axes=axes, binds=binds)


def margin_text(provenance: Provenance) -> str:
    """A sentence on the best plan of another structure."""
    margin, own_ns = provenance.margin, provenance.objective_ns
    if margin is None:
        return "not in the plan: it was not requested, or no plan of another structure is known"
    if margin.step_ns is None:
        least = _at_least(margin.bound_ns, own_ns)
        return f"as modelled, of plans of another structure {least}"
    text = (
        "as modelled, the best plan known of another structure takes "
        f"{_more(margin.step_ns, own_ns)}"
    )
    if margin.bound_ns < margin.step_ns:
        text += f", and {_at_least(margin.bound_ns, own_ns)}"
    return f"{text}: {margin.rival}"


def _at_least(bound_ns: int, own_ns: int) -> str:
    if bound_ns <= own_ns:
        return "none is proven to take longer than this one"
    return f"none takes less than {_more(bound_ns, own_ns)}"


def _more(ns: int, own_ns: int) -> str:
    share = format_share(abs(ns - own_ns), max(1, own_ns))
    return f"{format_ns(ns)} ({share} {'longer' if ns >= own_ns else 'shorter'})"


def _time(shares: Mapping[str, float], axes: tuple[AxisShare, ...]) -> str:
    shown = {name: share for name, share in shares.items() if share or name != _HOST}
    ordered = sorted(shown, key=lambda name: (-shares[name], name))
    words = ", ".join(f"{name} {format_percent(shares[name])}" for name in ordered)
    text = f"{ordered[0]} dominates the step: {words}"
    if axes and axes[0].time_ns:
        first = axes[0]
        over = f"{first.axis} ({first.link})" if first.link else first.axis
        text += (
            f"; the busiest axis is {over}, for {format_percent(first.share)} of the step, "
            f"of which {format_share(first.exposed_ns, first.time_ns)} is exposed"
        )
    return text


def _axes(plan: StagePlan, step: DrawnStep) -> tuple[AxisShare, ...]:
    times = Counter({axis.name: 0 for axis in plan.structure.mesh})
    for total in plan.estimates.collectives:
        times[total.axis] += total.time_ns
    links = {axis: link.name for axis, link in slowest_links(plan).items()}
    exposed = _exposed(plan, step, times)
    step_ns = max(1, plan.estimates.step_ns)
    return tuple(
        AxisShare(
            name, links.get(name, ""), ns, ns / step_ns, exposed[name], max(0, ns - exposed[name])
        )
        for name, ns in sorted(times.items(), key=lambda each: (-each[1], each[0]))
    )


def _exposed(plan: StagePlan, step: DrawnStep, times: Mapping[str, int]) -> dict[str, int]:
    """Exposed communication by axis, all that the plan has. The drawn step rounds: what is missing
    is added in proportion to what axes hide, what is too much is taken off in proportion to what
    they expose."""
    drawn = {name: step.axes.get(name, AxisTime(0, 0)).exposed_ns for name in times}
    missing = plan.estimates.exposed_communication_ns - sum(drawn.values())
    if missing < 0:
        less = apportion(-missing, [*drawn.values()])
        return {name: ns - part for (name, ns), part in zip(drawn.items(), less, strict=True)}
    more = apportion(missing, [max(0, times[name] - ns) for name, ns in drawn.items()])
    return {name: ns + part for (name, ns), part in zip(drawn.items(), more, strict=True)}
