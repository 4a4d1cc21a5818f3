"""A predicted step laid out in time: what each device computes and sends, and when.

The plan lists a step as runs of items (`plan.Run`) and has totals per item. Here every occurrence
of an item gets its share of the totals, in whole nanoseconds, so that the shares add up to exactly
the totals; occurrences follow one another, as they do on a device that waits for what it sends.
Repeated runs stay folded: their start and length are known without listing what is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.plans.matching import general
from autopar.plans.plan import OPTIMIZER, Estimates, Plan, Run

Kind = Literal["compute", "network", "optimizer"]


@dataclass(frozen=True, slots=True, order=True)
class Track:
    """What is busy: the device with ops or with its optimizer, or the links of a mesh axis."""

    kind: Kind
    axis: str = ""

    @property
    def name(self) -> str:
        return f"network {self.axis}" if self.kind == "network" else self.kind


COMPUTE = Track("compute")
UPDATE = Track("optimizer")


@dataclass(frozen=True, slots=True)
class Part:
    """What one item does on one track, all its occurrences together. `what` is the op or the kind
    of the collective, `count` how many of these there are, `module` a pattern."""

    key: str
    module: str
    track: Track
    what: str
    phase: str
    total_ns: int
    num_bytes: int
    count: int
    occurrences: int

    def ns(self, first: int, end: int) -> int:
        """Time of the occurrences from `first` up to `end`; all of them take `total_ns`."""
        return _share(self.total_ns, first, end, self.occurrences)


@dataclass(frozen=True, slots=True)
class Bar:
    """One part at one of its occurrences, or several in a row: it is busy from `start_ns` on for
    `duration_ns`."""

    part: Part
    start_ns: int
    duration_ns: int
    num_bytes: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run at its place in the step. `before` counts the earlier occurrences of its items."""

    run: Run
    start_ns: int
    end_ns: int
    before: Mapping[str, int]


@dataclass(frozen=True)
class Timeline:
    """A step: stretches one after the other, and the parts of every item."""

    stretches: tuple[Stretch, ...]
    parts: Mapping[str, tuple[Part, ...]]

    @property
    def end_ns(self) -> int:
        return self.stretches[-1].end_ns if self.stretches else 0

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """What is busy at some time: compute, the axes by name, the optimizer."""
        found = {part.track for parts in self.parts.values() for part in parts if part.total_ns}
        return tuple(sorted(found))

    @property
    def num_bars(self) -> int:
        """How many bars all repetitions of all runs have."""
        return sum(
            stretch.run.times * sum(len(self.parts[item]) for item in stretch.run.items)
            for stretch in self.stretches
        )

    def bars(self, stretch: Stretch, repetition: int = 0) -> Iterator[Bar]:
        """What happens in one repetition of a run, in order; nothing that takes no time."""
        each = Counter(stretch.run.items)
        start_ns = self.extent(stretch, repetition)[0]
        seen = {item: stretch.before[item] + repetition * times for item, times in each.items()}
        for item in stretch.run.items:
            k = seen[item]
            seen[item] = k + 1
            for part in self.parts[item]:
                duration_ns = part.ns(k, k + 1)
                if duration_ns:
                    num_bytes = _share(part.num_bytes, k, k + 1, part.occurrences)
                    yield Bar(part, start_ns, duration_ns, num_bytes)
                    start_ns += duration_ns

    def extent(self, stretch: Stretch, repetition: int) -> tuple[int, int]:
        """When one repetition of a run starts and ends."""
        ends = [
            stretch.start_ns
            + sum(
                part.ns(stretch.before[item], stretch.before[item] + k * times)
                for item, times in Counter(stretch.run.items).items()
                for part in self.parts[item]
            )
            for k in (repetition, repetition + 1)
        ]
        return ends[0], ends[1]

    def title(self, stretch: Stretch) -> str:
        """What a run is about: the block it repeats, and whether forward or backward."""
        weight: Counter[str] = Counter()
        phases: dict[str, None] = {}
        for item in stretch.run.items:
            for part in self.parts[item]:
                phases |= {part.phase or part.what: None}
                weight[block_of(part.module)] += part.total_ns
        block = max(weight, key=lambda name: (weight[name], name), default="")
        return " ".join([block] * (stretch.run.times > 1) + [" and ".join(phases)]).strip()

    def busy_ns(self, stretch: Stretch) -> dict[Track, int]:
        """How long each track is busy in all repetitions of a run together."""
        found: dict[Track, int] = {}
        for item, times in Counter(stretch.run.items).items():
            first = stretch.before[item]
            for part in self.parts[item]:
                ns = part.ns(first, first + times * stretch.run.times)
                found[part.track] = found.get(part.track, 0) + ns
        return found


def timeline(plan: Plan) -> Timeline:
    """The step of a plan (that `check` finds nothing wrong with)."""
    estimates = plan.estimates
    occurrences: Counter[str] = Counter()
    for run in estimates.order:
        for item, times in Counter(run.items).items():
            occurrences[item] += times * run.times
    parts = {item: tuple(_parts(estimates, item, n)) for item, n in occurrences.items()}
    stretches: list[Stretch] = []
    before: Counter[str] = Counter()
    start_ns = 0
    for run in estimates.order:
        each = Counter(run.items)
        first = {item: before[item] for item in each}
        for item, times in each.items():
            before[item] += times * run.times
        end_ns = start_ns + sum(
            part.ns(first[item], before[item]) for item in each for part in parts[item]
        )
        stretches.append(Stretch(run, start_ns, end_ns, first))
        start_ns = end_ns
    return Timeline(tuple(stretches), parts)


def _parts(estimates: Estimates, item: str, occurrences: int) -> Iterator[Part]:
    if item == OPTIMIZER:
        yield Part(item, "", UPDATE, "update", "", estimates.optimizer_ns, 0, 1, occurrences)
        return
    op = estimates.ops.get(item)
    maker = op or estimates.ops.get(item.partition("@")[0])
    module = general(maker.module) if maker else ""
    if op is not None:
        figures = op.compute_ns, 0, op.count, occurrences
        yield Part(item, module, COMPUTE, op.op, op.phase, *figures)
    for sent in estimates.sends.get(item, ()):
        figures = sent.time_ns, sent.num_bytes, sent.count, occurrences
        yield Part(item, module, Track("network", sent.axis), sent.kind, sent.phase, *figures)


def block_of(module: str) -> str:
    """`model.layers.*` of `model.layers.*.mlp.up`: the repeated module that one is within; itself
    if there is none."""
    names = module.split(".")
    return ".".join(names[: names.index("*") + 1]) if "*" in names else module


def _share(total: int, first: int, end: int, parts: int) -> int:
    """The shares from `first` up to `end` of `total` cut into `parts` that are as good as equal."""
    return total * end // parts - total * first // parts
