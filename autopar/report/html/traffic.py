"""What is sent in a step, by mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plans.plan import CollectiveTotal, Plan
from autopar.report.limits import find_limits


@dataclass(frozen=True, slots=True)
class SentRow:
    """All collectives of a kind, axis and phase; `share` is of the longest of all axes."""

    total: CollectiveTotal
    share: float


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """What one axis sends, the longest first; `link` is the slowest it crosses, "" if not known."""

    axis: str
    size: int
    link: str
    time_ns: int
    num_bytes: int
    rows: tuple[SentRow, ...]


def axis_traffic(plan: Plan) -> tuple[AxisTraffic, ...]:
    """The traffic of every axis of the mesh, also of those that send nothing."""
    totals = plan.estimates.collectives
    longest = max((total.time_ns for total in totals), default=0) or 1
    sizes = {axis.name: axis.size for axis in plan.structure.mesh}
    axes = dict.fromkeys([*sizes, *sorted({total.axis for total in totals})])
    links = {share.axis: share.link for share in find_limits(plan).axes}
    found: list[AxisTraffic] = []
    for axis in axes:
        of_axis = [total for total in totals if total.axis == axis]
        of_axis.sort(key=lambda total: (-total.time_ns, total.kind, total.phase))
        rows = tuple(SentRow(total, total.time_ns / longest) for total in of_axis)
        time_ns = sum(total.time_ns for total in of_axis)
        num_bytes = sum(total.num_bytes for total in of_axis)
        about = axis, sizes.get(axis, 0), links.get(axis, "")
        found.append(AxisTraffic(*about, time_ns, num_bytes, rows))
    return tuple(found)
