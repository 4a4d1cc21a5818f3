"""A predicted step laid out in time: what each device computes and sends, and when.

The plan lists a step as runs of items (`plans.order`) and has totals per op and per step of what is
sent. Here every occurrence gets its share of the totals, in whole nanoseconds, so that the shares
add up to exactly the totals, and the step is played by the same hardware as when it was priced.
What the shares differ from the prices makes its length differ from the plan's by as little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autopar.ir.timeline import Hardware
from autopar.plans.matching import general
from autopar.plans.order import CUT, OPTIMIZER, START, WAIT, WITH, Item, Run
from autopar.plans.plan import Estimates, Plan

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
    """An op, or one step of the way of a tensor, all its occurrences together. `what` is the op or
    the kind of the collective, `count` how many of these there are, `module` a pattern. A slice,
    and what an op sends while it runs, keep the device busy, not the links alone."""

    key: str
    module: str
    track: Track
    what: str
    phase: str
    total_ns: int
    num_bytes: int
    count: int
    occurrences: int
    is_sent: bool = False

    def ns(self, occurrence: int) -> int:
        """Time of one occurrence; all of them take `total_ns`."""
        return _share(self.total_ns, occurrence, self.occurrences)


@dataclass(frozen=True, slots=True)
class Bar:
    """One part at one of its occurrences: it is busy from `start_ns` on for `duration_ns`."""

    part: Part
    start_ns: int
    duration_ns: int
    num_bytes: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run at its place in the step: its first item is the step's item `first`; the device is at
    it from `start_ns` to `end_ns`."""

    run: Run
    first: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class DrawnStep:
    """A step: stretches one after the other, and all `bars`, those of item k from `bar_of[k]` on;
    the device comes to it at `turns[k]`. `waiting_ns` is what communication costs the device."""

    stretches: tuple[Stretch, ...]
    bars: tuple[Bar, ...]
    bar_of: Sequence[int]
    turns: Sequence[int]
    waiting_ns: int

    @property
    def end_ns(self) -> int:
        return self.turns[-1]

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """What is busy at some time: compute, the axes by name, the optimizer."""
        return tuple(sorted({bar.part.track for bar in self.bars}))

    def started(self, stretch: Stretch, repetition: int = 0) -> Sequence[Bar]:
        """What starts in one repetition of a run, in order."""
        first = stretch.first + repetition * len(stretch.run.items)
        return self.bars[self.bar_of[first] : self.bar_of[first + len(stretch.run.items)]]

    def extent(self, stretch: Stretch, repetition: int) -> tuple[int, int]:
        """From when to when the device is at one repetition of a run."""
        first = stretch.first + repetition * len(stretch.run.items)
        return self.turns[first], self.turns[first + len(stretch.run.items)]

    def within(self, start_ns: int, end_ns: int) -> Iterator[Bar]:
        """What happens in a time, cut to it."""
        for bar in self.bars:
            start, end = max(bar.start_ns, start_ns), min(bar.end_ns, end_ns)
            if start < end:
                yield Bar(bar.part, start, end - start, bar.num_bytes)

    def title(self, stretch: Stretch) -> str:
        """What a run is about: the block it repeats, and whether forward or backward."""
        weight: Counter[str] = Counter()
        phases: dict[str, None] = {}
        for bar in self.started(stretch):
            phases |= {bar.part.phase or bar.part.what: None}
            weight[block_of(bar.part.module)] += bar.duration_ns
        block = max(weight, key=lambda name: (weight[name], name), default="")
        return " ".join([block] * (stretch.run.times > 1) + [" and ".join(phases)]).strip()

    def busy_ns(self, stretch: Stretch) -> Mapping[Track, int]:
        """How long each track is busy while the device is at all repetitions of a run."""
        return self._busy[self.stretches.index(stretch)]

    @cached_property
    def _busy(self) -> Sequence[Mapping[Track, int]]:
        found: list[dict[Track, int]] = [defaultdict(int) for _ in self.stretches]
        starts = [stretch.start_ns for stretch in self.stretches]
        for bar in self.bars:
            place = bisect_right(starts, bar.start_ns) - 1
            while place < len(starts) and starts[place] < bar.end_ns:
                stretch = self.stretches[place]
                both = min(bar.end_ns, stretch.end_ns) - max(bar.start_ns, stretch.start_ns)
                found[place][bar.part.track] += max(0, both)
                place += 1
        return found


def timeline(plan: Plan) -> DrawnStep:
    """The step of a plan (that `check` finds nothing wrong with)."""
    return _Player(plan).run()


class _Player:
    def __init__(self, plan: Plan) -> None:
        self.estimates = plan.estimates
        self.axes = {axis.name: k for k, axis in enumerate(plan.structure.mesh)}
        runs = self.estimates.order
        self.texts = [text for run in runs for _ in range(run.times) for text in run.items]
        self.items = {text: self._item(text) for text in self.texts}
        self.parts = self._find_parts()
        self.done: Counter[Part] = Counter()
        self.hardware = Hardware([self.estimates.contention.get(name, 0) for name in self.axes])
        self.coming: dict[str, deque[int]] = defaultdict(deque)
        """The numbers of the messages that began with a text and were not waited for."""
        self.bars: list[Bar] = []
        self.sent: list[range] = []
        """Per message, the places of its bars."""

    def run(self) -> DrawnStep:
        turns, bar_of = [0], [0]
        for place, text in enumerate(self.texts):
            self._do(place, text)
            turns.append(self.hardware.now_ns)
            bar_of.append(len(self.bars))
        self._place_messages()
        stretches: list[Stretch] = []
        first = 0
        for run in self.estimates.order:
            end = first + run.times * len(run.items)
            stretches.append(Stretch(run, first, turns[first], turns[end]))
            first = end
        waiting_ns = self.hardware.exposed_ns
        return DrawnStep(tuple(stretches), tuple(self.bars), bar_of, turns, waiting_ns)

    def _place_messages(self) -> None:
        """How long each message takes is known when all is over: its tensors share that time."""
        for span, places in zip(self.hardware.finish(), self.sent, strict=True):
            asked, start_ns, done = sum(self.bars[k].duration_ns for k in places), span.start_ns, 0
            for k in places:
                bar = self.bars[k]
                done += bar.duration_ns
                end_ns = span.start_ns + (span.end_ns - span.start_ns) * done // max(1, asked)
                self.bars[k] = replace(bar, start_ns=start_ns, duration_ns=end_ns - start_ns)
                start_ns = end_ns

    def _item(self, text: str) -> Item | None:
        is_device = text in self.estimates.ops or text == OPTIMIZER
        return None if is_device else Item.parse(text)

    def _find_parts(self) -> dict[str, tuple[Part, ...]]:
        """What each item does. A step of a tensor's way begins with any of three words."""
        occurrences = Counter(self.texts)
        begun: Counter[Item] = Counter()
        for text, item in self.items.items():
            if item is not None:
                begun[item._replace(word="")] += occurrences[text] * (item.word != WAIT)
        return {
            text: tuple(
                _own(self.estimates, text, occurrences[text])
                if item is None
                else _sent(self.estimates, item, begun[item._replace(word="")])
            )
            for text, item in self.items.items()
        }

    def _do(self, place: int, text: str) -> None:
        item, hardware = self.items[text], self.hardware
        if item is None or item.word == CUT:
            for part in self.parts[text]:
                ns, num_bytes = self._share(part)
                span = hardware.communicate(ns) if part.is_sent else hardware.work(ns)
                self._add(part, span.start_ns, span.end_ns - span.start_ns, num_bytes)
        elif item.word == START:
            self._start(place, item)
        elif item.word == WAIT:
            ends = self.coming[f"{item.step} {item.key}"]
            if ends:
                hardware.wait(ends.popleft())

    def _start(self, place: int, first: Item) -> None:
        """A message: its tensors one behind the other."""
        parts = [*self.parts[self.texts[place]]]
        for text in self.texts[place + 1 :]:
            item = self.items[text]
            if item is None or item.word != WITH:
                break
            parts += self.parts[text]
        shares = [self._share(part) for part in parts]
        axis = self.axes.get(parts[0].track.axis, 0)
        number = self.hardware.start(axis, sum(ns for ns, _ in shares))
        self.coming[f"{first.step} {first.key}"].append(number)
        place = len(self.bars)
        for part, (ns, num_bytes) in zip(parts, shares, strict=True):
            self._add(part, self.hardware.now_ns, ns, num_bytes)
        self.sent.append(range(place, len(self.bars)))

    def _share(self, part: Part) -> tuple[int, int]:
        """Time and bytes of the next occurrence of a part."""
        k = self.done[part]
        self.done[part] += 1
        return part.ns(k), _share(part.num_bytes, k, part.occurrences)

    def _add(self, part: Part, start_ns: int, ns: int, num_bytes: int) -> None:
        if ns:
            self.bars.append(Bar(part, start_ns, ns, num_bytes))


def _own(estimates: Estimates, text: str, occurrences: int) -> Iterator[Part]:
    """What the device does for an item that is an op or the optimizer."""
    if text == OPTIMIZER:
        yield Part(text, "", UPDATE, "update", "", estimates.optimizer_ns, 0, 1, occurrences)
        return
    op = estimates.ops[text]
    module = general(op.module)
    yield Part(text, module, COMPUTE, op.op, op.phase, op.compute_ns, 0, op.count, occurrences)
    for sent in estimates.sends.get(text, ()):
        figures = sent.time_ns, sent.num_bytes, sent.count, occurrences
        yield Part(text, module, COMPUTE, sent.kind, sent.phase, *figures, is_sent=True)


def _sent(estimates: Estimates, item: Item, occurrences: int) -> Iterator[Part]:
    """What the links do for a tensor, or the device that cuts a slice."""
    sent = estimates.sends[item.key][item.step]
    maker = estimates.ops.get(item.key.partition("@")[0])
    track = COMPUTE if item.word == CUT else Track("network", sent.axis)
    yield Part(
        item.key, general(maker.module) if maker else "", track, sent.kind, sent.phase,
        sent.time_ns, sent.num_bytes, sent.count, occurrences, is_sent=True,
    )  # fmt: skip


def block_of(module: str) -> str:
    """`model.layers.*` of `model.layers.*.mlp.up`: the repeated module that one is within; itself
    if there is none."""
    names = module.split(".")
    return ".".join(names[: names.index("*") + 1]) if "*" in names else module


def _share(total: int, k: int, parts: int) -> int:
    """Share k of `total` cut into `parts` that are as good as equal."""
    return total * (k + 1) // parts - total * k // parts
