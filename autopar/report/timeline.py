"""A predicted step laid out in time: what each device computes and sends, and when.

The plan lists a step as runs of items (`plans.order`) and has totals per op and per step of a
route. Here every occurrence gets its share of the totals, in whole nanoseconds, so that the shares
add up to exactly the totals. The step is then simulated by the same hardware model as when it was
priced. Its length differs from the plan's as little as the shares differ from the prices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from autopar.ir.hardware import AxisTime, Hardware, Leg, Record, apportion, critical_path
from autopar.plans.estimates import StageEstimates
from autopar.plans.order import CUT, OPTIMIZER, START, WAIT, WITH, Item, Run
from autopar.plans.plan import StagePlan
from autopar.plans.requests.matching import general

Kind = Literal["compute", "host", "network", "optimizer"]


@dataclass(frozen=True, slots=True, order=True)
class Track:
    """A resource that is busy: the device with ops or with its optimizer, the links of a mesh axis,
    or the host, for which the device waits."""

    kind: Kind
    axis: str = ""

    @property
    def name(self) -> str:
        return f"network {self.axis}" if self.kind == "network" else self.kind


COMPUTE = Track("compute")
UPDATE = Track("optimizer")
HOST = Track("host")


@dataclass(frozen=True, slots=True)
class Part:
    """An op, or one step of a tensor's route, all its occurrences together. `what` is the op or the
    kind of the collective on `axis`, `count` how many of these there are, `module` a pattern. A
    slice, and what an op sends while it runs, keep the device busy, not the links alone. The host
    launches them in `host_ns`."""

    key: str
    module: str
    track: Track
    what: str
    phase: str
    total_ns: int
    num_bytes: int
    count: int
    occurrences: int
    axis: str = ""
    is_sent: bool = False
    host_ns: int = 0

    @property
    def by_host(self) -> Part:
        """Its launch, as the device sees it."""
        return replace(self, track=HOST, what="waiting for the host", is_sent=False)


class Bar(NamedTuple):
    """One part at one of its occurrences: it is busy from `start_ns` on for `duration_ns`, and if
    it is sent costs the device `exposed_ns`."""

    part: Part
    start_ns: int
    duration_ns: int
    num_bytes: int
    exposed_ns: int = 0

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
    """A step: stretches one after the other, and all `bars`. The bars of item k begin at
    `bar_of[k]`, and the device begins with it at `begins_ns[k]`. The bars of `path` are the
    critical path: from 0 to the end, each begins where the one before it ends, and because of that.
    `axes` has the communication on each axis, by its name."""

    stretches: tuple[Stretch, ...]
    bars: tuple[Bar, ...]
    bar_of: Sequence[int]
    begins_ns: Sequence[int]
    path: tuple[Bar, ...]
    axes: Mapping[str, AxisTime]

    @property
    def end_ns(self) -> int:
        return self.begins_ns[-1]

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """What is busy at some time: compute, the host where it is waited for, the axes by name,
        the optimizer."""
        return tuple(sorted({bar.part.track for bar in self.bars}))

    def started(self, stretch: Stretch, repetition: int = 0) -> Sequence[Bar]:
        """What starts in one repetition of a run, in order."""
        first = stretch.first + repetition * len(stretch.run.items)
        return self.bars[self.bar_of[first] : self.bar_of[first + len(stretch.run.items)]]

    def extent(self, stretch: Stretch, repetition: int) -> tuple[int, int]:
        """From when to when the device is at one repetition of a run."""
        first = stretch.first + repetition * len(stretch.run.items)
        return self.begins_ns[first], self.begins_ns[first + len(stretch.run.items)]

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

    def critical_ns(self, stretch: Stretch) -> Mapping[Track, int]:
        """For how long of that each track is on the critical path."""
        return self._critical[self.stretches.index(stretch)]

    @cached_property
    def _busy(self) -> Sequence[Mapping[Track, int]]:
        return self._by_stretch(self.bars)

    @cached_property
    def _critical(self) -> Sequence[Mapping[Track, int]]:
        return self._by_stretch(self.path)

    def _by_stretch(self, bars: Iterable[Bar]) -> Sequence[Mapping[Track, int]]:
        times: list[dict[Track, int]] = [defaultdict(int) for _ in self.stretches]
        starts = [stretch.start_ns for stretch in self.stretches]
        for bar in bars:
            place = bisect_right(starts, bar.start_ns) - 1
            while place < len(starts) and starts[place] < bar.end_ns:
                stretch = self.stretches[place]
                both = min(bar.end_ns, stretch.end_ns) - max(bar.start_ns, stretch.start_ns)
                times[place][bar.part.track] += max(0, both)
                place += 1
        return times


def within(bars: Iterable[Bar], start_ns: int, end_ns: int) -> Iterator[Bar]:
    """The bars within a time, cut to it."""
    for bar in bars:
        start, end = max(bar.start_ns, start_ns), min(bar.end_ns, end_ns)
        if start < end:
            yield bar._replace(start_ns=start, duration_ns=end - start)


def timeline(plan: StagePlan) -> DrawnStep:
    """The step of a plan (that `check` finds nothing wrong with)."""
    return _Simulator(plan).run()


class _Simulator:
    def __init__(self, plan: StagePlan) -> None:
        self.estimates = plan.estimates
        self.mesh = plan.structure.mesh
        self.axes = {name: k for k, name in enumerate(self.mesh.link_names)}
        runs = self.estimates.runs
        self.texts = [text for run in runs for _ in range(run.times) for text in run.items]
        self.items = {text: self._item(text) for text in self.texts}
        self.parts = self._find_parts()
        self.done: Counter[Part] = Counter()
        self.hardware = Hardware([self.estimates.contention.get(name, 0) for name in self.axes])
        self.coming: dict[str, deque[int]] = defaultdict(deque)
        """The numbers of the messages that began with a text and were not waited for."""
        self.bars: list[Bar] = []
        self.done_in: list[range] = []
        self.sent: list[range] = []
        """The places of the bars of each act of the device, and of each message."""
        self.launched: list[Part] = []
        """What the host launches, one after the other; of a message its first tensor."""

    def run(self) -> DrawnStep:
        begins_ns, bar_of = [0], [0]
        for place, text in enumerate(self.texts):
            self._do(place, text)
            begins_ns.append(self.hardware.now_ns)
            bar_of.append(len(self.bars))
        record = self.hardware.finish()
        self._place_messages(record)
        runs = self.estimates.runs
        firsts = accumulate((run.times * len(run.items) for run in runs), initial=0)
        stretches = tuple(
            Stretch(run, first, begins_ns[first], begins_ns[end])
            for run, (first, end) in zip(runs, pairwise(firsts), strict=True)
        )
        path = tuple(bar for leg in critical_path(record) for bar in self._bars_of(leg))
        axes = {
            name: record.axes.get(k, AxisTime(0, 0))
            for name, k in self.axes.items()
            if name in self.mesh.names or k in record.axes
        }
        return DrawnStep(stretches, tuple(self.bars), bar_of, begins_ns, path, axes)

    def _bars_of(self, leg: Leg) -> Iterable[Bar]:
        if leg.by == "host":
            (start_ns, end_ns), part = leg.span, self.launched[leg.number]
            return (Bar(part.by_host, start_ns, end_ns - start_ns, 0),)
        places = self.sent if leg.by == "links" else self.done_in
        return (self.bars[k] for k in places[leg.number])

    def _place_messages(self, record: Record) -> None:
        """Sets the times of messages, which are known at the end: the tensors of a message share
        its time."""
        for sending, places in zip(record.sendings, self.sent, strict=True):
            (start_ns, end_ns), lengths_ns = (
                sending.span,
                [self.bars[k].duration_ns for k in places],
            )
            shares = zip(
                places,
                apportion(end_ns - start_ns, lengths_ns),
                apportion(sending.exposed_ns, lengths_ns),
                strict=True,
            )
            for k, ns, exposed_ns in shares:
                self.bars[k] = self.bars[k]._replace(
                    start_ns=start_ns, duration_ns=ns, exposed_ns=exposed_ns
                )
                start_ns += ns

    def _item(self, text: str) -> Item | None:
        is_device = text in self.estimates.ops or text == OPTIMIZER
        return None if is_device else Item.parse(text)

    def _find_parts(self) -> dict[str, tuple[Part, ...]]:
        """The parts of each item. A step of a route begins with any of three words."""
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
            parts = self.parts[text]
            self._launch(parts[0], sum(map(self._host_share, parts)))
            for part in parts:
                ns, num_bytes = self._share(part)
                if part.is_sent:
                    span, exposed_ns = hardware.communicate(self._axis(part), ns), ns
                else:
                    span, exposed_ns = hardware.work(ns), 0
                first = len(self.bars)
                if ns:
                    took_ns = span.end_ns - span.start_ns
                    self.bars.append(Bar(part, span.start_ns, took_ns, num_bytes, exposed_ns))
                self.done_in.append(range(first, len(self.bars)))
        elif item.word == START:
            self._start(place, item)
        elif item.word == WAIT:
            ends = self.coming[f"{item.step} {item.key}"]
            if ends:
                hardware.wait(ends.popleft())
                self.done_in.append(range(0))

    def _start(self, place: int, first: Item) -> None:
        """A message: its tensors one behind the other."""
        parts = [*self.parts[self.texts[place]]]
        for behind in range(place + 1, len(self.texts)):
            item = self.items[self.texts[behind]]
            if item is None or item.word != WITH:
                break
            parts += self.parts[self.texts[behind]]
        self._launch(parts[0], sum(map(self._host_share, parts)))
        shares = [self._share(part) for part in parts]
        number = self.hardware.start(self._axis(parts[0]), sum(ns for ns, _ in shares))
        self.coming[f"{first.step} {first.key}"].append(number)
        place = len(self.bars)
        now_ns = self.hardware.now_ns
        sent = zip(parts, shares, strict=True)
        self.bars += [Bar(part, now_ns, ns, num_bytes) for part, (ns, num_bytes) in sent if ns]
        self.sent.append(range(place, len(self.bars)))

    def _launch(self, part: Part, ns: int) -> None:
        """The host launches a part, or what begins with it, and the device may wait for that."""
        if not ns:
            return
        waits = self.hardware.launch(ns)
        self.launched.append(part)
        if waits is not None:
            first, ns = len(self.bars), waits.end_ns - waits.start_ns
            self.bars += [Bar(part.by_host, waits.start_ns, ns, 0)] * (ns > 0)
            self.done_in.append(range(first, len(self.bars)))

    def _host_share(self, part: Part) -> int:
        return _share(part.host_ns, self.done[part], part.occurrences)

    def _axis(self, part: Part) -> int:
        """The number of the axis on which a part is sent."""
        return self.axes.setdefault(part.axis, len(self.axes))

    def _share(self, part: Part) -> tuple[int, int]:
        """Time and bytes of the next occurrence of a part."""
        k = self.done[part]
        self.done[part] += 1
        count = part.occurrences
        return _share(part.total_ns, k, count), _share(part.num_bytes, k, count)


def _own(estimates: StageEstimates, text: str, occurrences: int) -> Iterator[Part]:
    """What the device does for an item that is an op or the optimizer."""
    if text == OPTIMIZER:
        yield Part(text, "", UPDATE, "update", "", estimates.optimizer_ns, 0, 1, occurrences)
        return
    op = estimates.ops[text]
    module = general(op.module)
    yield Part(
        text, module, COMPUTE, op.op, op.phase, op.compute_ns, 0, op.count, occurrences,
        host_ns=op.host_ns,
    )  # fmt: skip
    for sent in estimates.sends.get(text, ()):
        figures = sent.time_ns, sent.num_bytes, sent.count, occurrences
        yield Part(text, module, COMPUTE, sent.kind, sent.phase, *figures, sent.axis, is_sent=True)


def _sent(estimates: StageEstimates, item: Item, occurrences: int) -> Iterator[Part]:
    """What the links do for a tensor, or the device that cuts a slice."""
    sent = estimates.sends[item.key][item.step]
    maker = estimates.ops.get(item.key.partition("@")[0])
    track = COMPUTE if item.word == CUT else Track("network", sent.axis)
    yield Part(
        item.key, general(maker.module) if maker else "", track, sent.kind, sent.phase,
        sent.time_ns, sent.num_bytes, sent.count, occurrences, sent.axis, is_sent=True,
        host_ns=sent.host_ns,
    )  # fmt: skip


def block_of(module: str, inner: int = 0) -> str:
    """`model.layers.*` of `model.layers.*.mlp.up`: the repeated module that one is within, with
    `inner` more names behind it; itself if there is none."""
    names = module.split(".")
    return ".".join(names[: names.index("*") + 1 + inner]) if "*" in names else module


def _share(total: int, k: int, parts: int) -> int:
    """Share k of `total` cut into `parts` that are as good as equal."""
    return total * (k + 1) // parts - total * k // parts
