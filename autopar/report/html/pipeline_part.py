"""A pipeline as a picture and figures: what the page of a plan says of all its stages together.

A row of the picture is a rank, a bar what it does of a microbatch. Bars that are too thin to be
seen are drawn together with their neighbours, one above the other, each as high as its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.pipeline import Pass
from autopar.ir.units import format_ns, format_percent, format_share
from autopar.plans.plan import Plan
from autopar.report.costs import HostUse, host_use
from autopar.report.html.memory import MemoryUse, at_peak
from autopar.report.html.schedule import ActionTrack, DrawnBar, Panel, TrackRow
from autopar.report.names import stages_text
from autopar.report.pipeline import PipelineContent, simulated_plan
from autopar.report.timeline import UPDATE, Track
from autopar.report.waits import MAX_RANKS, SimulatedAction, SimulatedRank

SHARED = Track("network")
"""The track of messages at the end of a step."""

MAX_ACTION_BARS = 4000
"""Bars of the picture, about, and of a row of it."""
MAX_BARS_OF_ROW = 250

PASS_WORDS = {
    Pass.FORWARD: "forward",
    Pass.BACKWARD: "backward",
    Pass.WEIGHTS: "gradients of parameters",
}


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """What the page says of all stages together. `passes` are those of its picture, which has no
    room for `num_left_out` ranks; `memory` is what a device of a rank holds for all of its stages,
    by their title."""

    content: PipelineContent
    panel: Panel
    passes: tuple[Pass, ...]
    num_left_out: int
    memory: tuple[tuple[str, MemoryUse], ...]
    host: HostUse | None


def pipeline_part(plan: Plan, content: PipelineContent) -> PipelinePart:
    """The part of a plan in stages."""
    table, simulated, ranks = simulated_plan(plan)
    kinds = {action.kind for row in table.rows for action in row}
    return PipelinePart(
        content=content,
        panel=Panel("", "The step", simulated.step_ns, (), tuple(_rows(ranks, simulated.step_ns))),
        passes=tuple(kind for kind in Pass if kind in kinds),
        num_left_out=max(0, len(ranks) - MAX_RANKS),
        memory=tuple(
            (stages_text(row.stages), at_peak(row.memory, row.memory_limit_bytes))
            for row in content.ranks
        ),
        host=host_use(plan.estimates, plan),
    )


def _rows(ranks: Sequence[SimulatedRank], step_ns: int) -> Iterator[TrackRow]:
    shown = ranks[:MAX_RANKS]
    of_row = min(MAX_BARS_OF_ROW, max(20, MAX_ACTION_BARS // max(1, len(shown))))
    for k, rank in enumerate(shown):
        bars = [_drawn(group, rank) for group in _groups(rank.actions, step_ns / of_row)]
        title = (
            f"rank {k}: {', '.join(map(str, rank.stages))}"
            if len(rank.stages) > 1
            else stages_text(rank.stages)
        )
        blocks = [bar for group in bars for bar in group]
        at_end = (
            (SHARED, "shared", rank.complete_ns - rank.shared_ns, rank.complete_ns),
            (UPDATE, "optimizer", rank.complete_ns, rank.complete_ns + rank.update_ns),
        )
        for track, what, start_ns, end_ns in at_end:
            if start_ns < end_ns:
                tip = f"{what}\nfrom {format_ns(start_ns)}, for {format_ns(end_ns - start_ns)}"
                blocks.append(DrawnBar(track, start_ns, end_ns, 1.0, (what,), tip))
        yield TrackRow(title, tuple(blocks))


def _groups(actions: Iterable[SimulatedAction], thin_ns: float) -> Iterator[list[SimulatedAction]]:
    """Actions that are drawn as one bar: thin ones that nearly touch, until the bar can be seen."""
    group: list[SimulatedAction] = []
    for each in actions:
        is_apart = bool(group) and each.start_ns - group[-1].end_ns >= thin_ns
        if group and (is_apart or each.end_ns - each.start_ns >= thin_ns):
            yield group
            group = []
        group.append(each)
        if each.end_ns - group[0].start_ns >= thin_ns:
            yield group
            group = []
    if group:
        yield group


def _drawn(group: Sequence[SimulatedAction], rank: SimulatedRank) -> Iterator[DrawnBar]:
    first, last = group[0], group[-1]
    if len(group) == 1:
        labels = (*[str(first.action)] * (len(rank.stages) > 1), str(first.action.microbatch))
        track = _track(first, rank)
        yield DrawnBar(track, first.start_ns, first.end_ns, 1.0, labels, _tip(first))
        return
    busy: Counter[ActionTrack] = Counter()
    for each in group:
        busy[_track(each, rank)] += each.end_ns - each.start_ns
    whole_ns = max(1, last.end_ns - first.start_ns)
    order = {kind: place for place, kind in enumerate(Pass)}
    words = [
        f"{len(group)} actions, {first.action} to {last.action}",
        f"from {format_ns(first.start_ns)}, for {format_ns(whole_ns)}",
        f"waiting {format_share(whole_ns - busy.total(), whole_ns)}",
    ]
    base = 0.0
    for track in sorted(busy, key=lambda track: (order[track.kind], track.chunk)):
        share = busy[track] / whole_ns
        tip = "\n".join((*words, f"{PASS_WORDS[track.kind]} {format_percent(share)}"))
        yield DrawnBar(track, first.start_ns, last.end_ns, share, (), tip, len(group), base)
        base += share


def _track(each: SimulatedAction, rank: SimulatedRank) -> ActionTrack:
    return ActionTrack(each.action.kind, rank.stages.index(each.action.stage))


def _tip(each: SimulatedAction) -> str:
    stage, kind, microbatch = each.action
    lines = [
        f"{each.action}: {PASS_WORDS[kind]}, microbatch {microbatch}, stage {stage}",
        f"from {format_ns(each.start_ns)}, for {format_ns(each.end_ns - each.start_ns)}",
    ]
    if each.after is not None:
        sent = f", {format_ns(each.sent_ns)} of it while that is under way" if each.sent_ns else ""
        lines.append(
            f"its rank waits {format_ns(each.waited_ns)} for what {each.after} sends{sent}"
        )
    return "\n".join(lines)
