"""The step as rows of bars: the content of the page's Gantt picture.

The first panel has the whole step. A run that repeats is one bar there with a letter, filled as far
as each track is busy in it. The panel of that letter has one repetition, op by op. The first row of
a panel is the critical path, in bars of the tracks along it. A run that repeats has these bars one
above the other, each as high as its share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import NamedTuple

from autopar.ir.pipeline import Pass
from autopar.ir.units import format_bytes, format_ns
from autopar.plans.plan import StagePlan
from autopar.report.names import short_op
from autopar.report.placed import route_text
from autopar.report.timeline import Bar, DrawnStep, Part, Stretch, Track, within

THIN = 1 / 700
"""Bars below this share of a panel's width are drawn together with their neighbours."""

LEGIBLE = 0.6
"""A bar that is filled so far has room for a label."""

CRITICAL = "critical path"

MAX_LETTERS = 12
"""Runs that are drawn from within; the longest."""


class ActionTrack(NamedTuple):
    """What a rank of a pipeline does for its first, second, ... stage."""

    kind: Pass
    chunk: int


@dataclass(frozen=True, slots=True)
class DrawnBar:
    """A bar of a panel. `busy` is the share of its time in which `track`, which has a colour, does
    something, drawn above the share `base`; `count` the bars it is made of. The first of `labels`
    that has room is written on it."""

    track: Track | ActionTrack
    start_ns: int
    end_ns: int
    busy: float
    labels: tuple[str, ...]
    tip: str
    count: int = 1
    base: float = 0.0

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class TrackRow:
    """What one track does, or all of them on the critical path."""

    title: str
    blocks: tuple[DrawnBar, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """A time with all its tracks. `spans` are runs, named and over all rows; `letter` is the run
    that the panel shows from within, empty for the whole step."""

    letter: str
    title: str
    ns: int
    spans: tuple[DrawnBar, ...]
    rows: tuple[TrackRow, ...]


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as a row of a table."""

    letter: str
    title: str
    times: int
    start_ns: int
    ns: int
    busy_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnSchedule:
    """The panels, and the same as a table, whose columns are of `tracks`."""

    panels: tuple[Panel, ...]
    tracks: tuple[Track, ...]
    runs: tuple[RunRow, ...]


def drawn_schedule(plan: StagePlan, step: DrawnStep) -> DrawnSchedule:
    """The schedule of a plan whose step is `step`; nothing is drawn of one that takes no time."""
    letters = _letters(step)
    panels = [_overview(step, letters, plan)] if step.end_ns else []
    panels += [_inside(step, stretch, letter, plan) for stretch, letter in letters]
    return DrawnSchedule(tuple(panels), step.tracks, tuple(_runs(step, letters)))


def _letters(step: DrawnStep) -> list[tuple[Stretch, str]]:
    """The repeated runs that are drawn from within, in order, each with its letter."""
    repeated = [
        s
        for s in step.stretches
        if s.run.times > 1 and len(set(step.extent(s, s.run.times // 2))) > 1
    ]
    longest = sorted(repeated, key=lambda s: (s.start_ns - s.end_ns, s.start_ns))[:MAX_LETTERS]
    shown = sorted(longest, key=lambda s: s.start_ns)
    return list(zip(shown, ascii_uppercase, strict=False))


def _overview(step: DrawnStep, letters: list[tuple[Stretch, str]], plan: StagePlan) -> Panel:
    letter_of = {stretch.start_ns: letter for stretch, letter in letters}
    bars = _no_bars(step)
    spans: list[DrawnBar] = []
    for stretch in step.stretches:
        if stretch.end_ns == stretch.start_ns:
            continue
        if stretch.run.times == 1:
            _add_bars(bars, step, (stretch.start_ns, stretch.end_ns), 0, step.end_ns * THIN, plan)
            continue
        title = f"{step.title(stretch)}, {stretch.run.times} times"
        letter = letter_of.get(stretch.start_ns, "")
        long = f"{letter}  {title}".strip()
        labels = long, f"{letter} ×{stretch.run.times}", letter
        spans.append(_whole(Track("compute"), stretch, 1.0, labels, title))
        _add_run(bars, step, stretch, title)
    return Panel("", "The step", step.end_ns, tuple(spans), _rows(bars))


def _add_run(
    bars: dict[str, list[DrawnBar]], step: DrawnStep, stretch: Stretch, title: str
) -> None:
    """All repetitions of a run as one bar for each track, and for each on the critical path."""
    whole_ns = stretch.end_ns - stretch.start_ns
    for track, ns in step.busy_ns(stretch).items():
        if ns:
            labels = (f"{100 * ns / whole_ns:.0f} %",)
            about = f"{track.name}, {title}"
            bars[track.name].append(_whole(track, stretch, ns / whole_ns, labels, about))
    base = 0.0
    for track, ns in sorted(step.critical_ns(stretch).items()):
        if ns:
            share = ns / whole_ns
            labels = (f"{track.name} {100 * share:.0f} %",) * (share > LEGIBLE)
            about = f"{CRITICAL}: {track.name}, {title}"
            bars[CRITICAL].append(replace(_whole(track, stretch, share, labels, about), base=base))
            base += share


def _whole(
    track: Track, stretch: Stretch, busy: float, labels: tuple[str, ...], about: str
) -> DrawnBar:
    ns = stretch.end_ns - stretch.start_ns
    tip = f"{about}\n{format_ns(round(busy * ns))} of {format_ns(ns)}"
    return DrawnBar(track, stretch.start_ns, stretch.end_ns, busy, labels, tip)


def _inside(step: DrawnStep, stretch: Stretch, letter: str, plan: StagePlan) -> Panel:
    """One repetition in the middle, where what came before and comes behind is like it."""
    start_ns, end_ns = step.extent(stretch, stretch.run.times // 2)
    bars = _no_bars(step)
    _add_bars(bars, step, (start_ns, end_ns), start_ns, (end_ns - start_ns) * THIN, plan)
    title = f"{step.title(stretch)}, once of {stretch.run.times} times"
    return Panel(letter, title, end_ns - start_ns, (), _rows(bars))


def _no_bars(step: DrawnStep) -> dict[str, list[DrawnBar]]:
    return {title: [] for title in (CRITICAL, *(track.name for track in step.tracks))}


def _rows(bars: dict[str, list[DrawnBar]]) -> tuple[TrackRow, ...]:
    return tuple(TrackRow(title, tuple(blocks)) for title, blocks in bars.items() if blocks)


def _add_bars(
    bars: dict[str, list[DrawnBar]],
    step: DrawnStep,
    shown_ns: tuple[int, int],
    zero_ns: int,
    thin_ns: float,
    plan: StagePlan,
) -> None:
    """What happens from the first to the second of `shown_ns`, each bar in its row."""
    for bar in within(step.path, *shown_ns):
        _add_bar(bars[CRITICAL], bar, zero_ns, thin_ns, plan)
    for bar in within(step.bars, *shown_ns):
        _add_bar(bars[bar.part.track.name], bar, zero_ns, thin_ns, plan)


def _add_bar(
    blocks: list[DrawnBar], bar: Bar, zero_ns: int, thin_ns: float, plan: StagePlan
) -> None:
    """Thin ones of one track that nearly touch become one."""
    track, start_ns, end_ns = bar.part.track, bar.start_ns - zero_ns, bar.end_ns - zero_ns
    before = blocks[-1] if blocks else None
    thin = bar.duration_ns < thin_ns
    if (
        before
        and thin
        and before.track == track
        and (before.count > 1 or before.ns < thin_ns)
        # Of a message over several axes, which no plan has but a file may, one starts sooner.
        and before.start_ns <= start_ns < before.end_ns + thin_ns
    ):
        busy = (before.busy * before.ns + bar.duration_ns) / (end_ns - before.start_ns)
        count = before.count + 1
        tip = f"{count} short ones, {format_ns(end_ns - before.start_ns)}"
        blocks[-1] = DrawnBar(track, before.start_ns, end_ns, busy, (), tip, count)
    else:
        labels, tip = _labels(bar.part), _tip(bar, plan)
        blocks.append(DrawnBar(track, start_ns, end_ns, 1.0, labels, tip))


def _labels(part: Part) -> tuple[str, ...]:
    """`down_proj mm`, `down_proj`; `all_gather`."""
    if part.is_sent or part.track.kind != "compute":
        return (part.what,)
    module = part.module.rpartition(".")[2].strip("*")
    return (
        f"{module} {short_op(part.what)}".strip(),
        module or short_op(part.what),
        short_op(part.what),
    )


def _tip(bar: Bar, plan: StagePlan) -> str:
    part = bar.part
    lines = [f"{part.what}: {format_ns(bar.duration_ns)}", part.module, part.phase]
    if part.is_sent:
        lines[0] += f", {format_bytes(bar.num_bytes)}"
        lines.append(route_text(plan.structure.routes.get(part.key, ()), plan.structure.mesh))
    return "\n".join(line for line in lines if line)


def _runs(step: DrawnStep, letters: list[tuple[Stretch, str]]) -> Iterable[RunRow]:
    letter_of = {stretch.start_ns: letter for stretch, letter in letters}
    for stretch in step.stretches:
        busy = step.busy_ns(stretch)
        yield RunRow(
            letter=letter_of.get(stretch.start_ns, "") if stretch.run.times > 1 else "",
            title=step.title(stretch),
            times=stretch.run.times,
            start_ns=stretch.start_ns,
            ns=stretch.end_ns - stretch.start_ns,
            busy_ns=tuple(busy.get(track, 0) for track in step.tracks),
        )
