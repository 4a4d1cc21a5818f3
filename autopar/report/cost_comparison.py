"""The cost breakdowns of two plans, side by side: time of a step, and memory at the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.ir.grouping import grouped
from autopar.ir.units import format_bytes, format_ns, format_ppm
from autopar.plans.estimates import Estimates
from autopar.plans.plan import Plan
from autopar.report.costs import HOLDER_TITLES, HOST_LABEL, held_by
from autopar.report.stage_content import blocks

Unit = Literal["ns", "bytes", "flops", "tokens/s", "samples/s", "ppm"]

TIME = "time"
MEMORY = "memory per device at the peak"
AXES = "communication by axis"
BLOCKS = "blocks"
RATES = "rates"
STAGES = "stages"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both cost breakdowns; None if a plan lacks it. `whole` is the old step, or the
    old peak, by which its change is measured. Figures without one are shown, and never count."""

    section: str
    name: str
    unit: Unit
    before: int | None
    after: int | None
    whole: int | None = None
    change_percent: float | None = None
    """Of the figure itself; None if it was 0 or is not in both."""

    @property
    def is_changed(self) -> bool:
        return self.before != self.after and None not in (self.before, self.after)


def compare_costs(old: Plan, new: Plan) -> tuple[Figure, ...]:
    """The figures of both plans, those of a section together, in order of the step and of names."""
    before, after = dict(_entries(old.estimates)), dict(_entries(new.estimates))
    measures = {"ns": old.estimates.step_ns, "bytes": old.estimates.memory.total}
    is_measured = (TIME, MEMORY, AXES, BLOCKS, STAGES)
    figures: list[Figure] = []
    for place in sorted({**before, **after}, key=lambda p: (_SECTIONS.index(p[0]), p[1])):
        section, _, name, unit = place
        least = 0 if section in (AXES, BLOCKS) else None
        a, b = before.get(place, least), after.get(place, least)
        whole = measures.get(unit) if section in is_measured else None
        figures.append(Figure(section, name, unit, a, b, whole, _percent(a, b)))
    return tuple(figures)


OWN_WORDS = (TIME, MEMORY, STAGES, RATES)
"""Sections whose figures have names of autopar's; those of the others come from the plans."""

_SECTIONS = (TIME, MEMORY, STAGES, AXES, BLOCKS, RATES)

_HOLDERS = ("peak", *HOLDER_TITLES.values())
"""All holders of memory, in order; a plan may lack some."""

_Place = tuple[str, tuple[int, str], str, Unit]
"""Section, order within it, name and unit."""


def _entries(estimates: Estimates) -> Iterator[tuple[_Place, int]]:
    memory = estimates.memory
    times: Mapping[str, int] = {
        "step": estimates.step_ns,
        "compute": estimates.compute_ns,
        "communication": estimates.communication_ns,
        "exposed communication": estimates.exposed_communication_ns,
        "hidden communication": estimates.hidden_communication_ns,
        "optimizer": estimates.optimizer_ns,
        "waiting for the host": estimates.exposed_host_ns,
        "waiting for other stages": estimates.bubble_ns,
    }
    for k, (name, ns) in enumerate(times.items()):
        yield (TIME, (k, ""), name, "ns"), ns
    for name, num_bytes in {"peak": memory.total, **held_by(memory)}.items():
        yield (MEMORY, (_HOLDERS.index(name), ""), name, "bytes"), num_bytes
    if estimates.host_bytes:
        yield (MEMORY, (len(_HOLDERS), ""), HOST_LABEL, "bytes"), estimates.host_bytes
    several = estimates.stages if len(estimates.stages) > 1 else ()
    for k, each in enumerate(several):
        stage: list[tuple[str, Unit, int]] = [
            ("all microbatches", "ns", each.step_ns),
            ("forward of one", "ns", each.microbatch.forward_ns),
            ("backward of one", "ns", each.microbatch.backward_ns),
            ("peak", "bytes", each.memory.total),
        ]
        if each.microbatch.weights_ns:
            stage.insert(3, ("weights of one", "ns", each.microbatch.weights_ns))
        for what, unit, figure in stage:
            yield (STAGES, (k, ""), f"stage {k}, {what}", unit), figure
    totals = [total for each in estimates.stages for total in each.collectives]
    by_axis = grouped(((total.axis, total.kind), total.time_ns) for total in totals)
    for (axis, kind), each_ns in by_axis.items():
        yield (AXES, (0, f"{axis} {kind}"), f"{kind} on {axis}", "ns"), sum(each_ns)
    for block in blocks([op for each in estimates.stages for op in each.ops.values()]):
        yield (BLOCKS, (0, block.module), block.module, "ns"), block.total_ns
    yield (RATES, (0, ""), "FLOPs of the model", "flops"), estimates.flops
    if estimates.samples:
        yield (RATES, (1, ""), "samples per second", "samples/s"), estimates.samples_per_s
    else:
        yield (RATES, (1, ""), "tokens per second", "tokens/s"), estimates.tokens_per_s
    yield (RATES, (2, ""), "model FLOPs utilisation", "ppm"), estimates.mfu_ppm


def _percent(before: int | None, after: int | None) -> float | None:
    return None if not before or after is None else round(100 * (after - before) / before, 4)


_TEXTS: Mapping[Unit, Callable[[int], str]] = {
    "ns": format_ns, "bytes": format_bytes, "ppm": format_ppm
}  # fmt: skip


def value_text(value: int | None, unit: Unit) -> str:
    """`412 ms`; empty for what a plan lacks."""
    return "" if value is None else _TEXTS.get(unit, "{:.4g}".format)(value)


def change_text(figure: Figure) -> str:
    """`+3.3 %`; empty where nothing changed, or no percentage says it."""
    percent = figure.change_percent
    if not percent:
        return "new" if figure.after and figure.before == 0 else ""
    text = f"{percent:+.3g} %"
    return text if percent < 1000 else f"x{1 + percent / 100:.3g}"
