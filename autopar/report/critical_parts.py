"""The critical path of a step (`ir.hardware`) in a few rows: what determines how long it
takes, all of a kind together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.hardware import apportion
from autopar.ir.units import format_ns, format_percent
from autopar.plans.plan import StagePlan
from autopar.report.costs import Cost
from autopar.report.names import WHOLE_MODEL, tensor_name
from autopar.report.printed import name, with_rest
from autopar.report.printed import table as new_table
from autopar.report.timeline import Bar, DrawnStep, block_of

MAX_CRITICAL = 8
"""Rows that are printed."""


def critical_parts(plan: StagePlan, step: DrawnStep) -> tuple[Cost, ...]:
    """The parts of the critical path of `step`, the longest first: for `time_ns` of the step all
    else waits for what there is of a kind, or is hidden behind it. What slows it down is in its
    time. They add up to the step of the plan, from which the drawn one may differ by what it
    rounds."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for bar in step.path:
        total = sums[_kind(plan, bar)]
        total[0], total[1] = total[0] + 1, total[1] + bar.duration_ns
    times_ns = apportion(plan.estimates.step_ns, [ns for _, ns in sums.values()])
    whole_ns = max(1, plan.estimates.step_ns)
    found = [
        Cost(*kind, count, ns, ns / whole_ns)
        for (kind, (count, _)), ns in zip(sums.items(), times_ns, strict=True)
    ]
    return tuple(sorted(found, key=lambda part: (-part.time_ns, part.where, part.what, part.phase)))


def _kind(plan: StagePlan, bar: Bar) -> tuple[str, str, str]:
    part = bar.part
    if part.is_sent:
        where = part.module or tensor_name(plan.estimates, part.key)
        return f"{part.what} on {part.axis}", block_of(where, inner=1), part.phase
    return part.track.kind, block_of(part.module) or WHOLE_MODEL, part.phase


def critical_table(parts: Sequence[Cost]) -> RenderableType:
    """The longest of them."""
    if not parts:
        return Text("not known: the plan does not say in which order its step does what")
    return with_rest(kinds_table(parts[:MAX_CRITICAL]), len(parts), MAX_CRITICAL)


def kinds_table(parts: Sequence[Cost]) -> Table:
    """A row for each."""
    rows = (
        (
            *map(name, (part.what, part.where, part.phase)),
            str(part.count),
            format_ns(part.time_ns),
            format_percent(part.share),
        )
        for part in parts
    )
    return new_table(("what", "where", "phase"), ("count", "time", "share"), rows)
