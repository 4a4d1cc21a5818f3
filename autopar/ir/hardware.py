"""A device and its links at work: what they do when, what communication costs the device, and what
determines when it is done.

The device does one thing after another; the links of each mesh axis do theirs beside it, in the
order in which they are started. What communication costs the device is exposed, whether it waits or
is slowed down; the rest is hidden. A host launches what both do, one thing after the other, and the
device waits for it where it is behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

# Whole numbers in proportion.


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts, in proportion to `weights`, that add up to it: each is rounded down,
    and what is left goes by ones to those that lost most, of equals to the first (the method of
    Hamilton, or of largest remainders). All 0 where the weights are."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    quotas = [divmod(total * weight, whole) for weight in weights]
    parts = [int(part) for part, _ in quotas]
    lost = sorted(range(len(parts)), key=lambda k: -quotas[k][1])
    for k in lost[: max(0, total - sum(parts))]:
        parts[k] += 1
    return parts


_THOUSAND = 1000


class Span(NamedTuple):
    """When something starts and ends, in nanoseconds."""

    start_ns: int
    end_ns: int


class Act(NamedTuple):
    """What the device does at one time: it works, is busy for the communication on `axis`, or waits
    for the message `awaited` or the host's launch `launched`. Acts follow one another without a
    gap."""

    span: Span
    axis: int | None = None
    awaited: int | None = None
    launched: int | None = None


class Sending(NamedTuple):
    """A message on the links of `axis`, which would take `alone_ns` with nothing beside it. It was
    given to them after the first `num_before` acts of the device, when the message `behind` was the
    last of those that had not come (None if the links were idle)."""

    axis: int
    alone_ns: int
    exposed_ns: int
    span: Span
    num_before: int
    behind: int | None


class Mark(NamedTuple):
    """The state of a device when no message is in flight: the time that has passed, was worked, and
    was spent waiting for its host, all in ns. The host is `ahead` of the device. `own` is the time
    that the device itself communicated, per axis."""

    now: float
    worked_ns: int
    waited: float
    ahead: float
    own: Mapping[int, int]


class AxisTime(NamedTuple):
    """What communication on a mesh axis takes alone, and how much of that is exposed."""

    alone_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Record:
    """All that was done: by the device, by the links, messages by their numbers, and by the host,
    launches by theirs. `axes` adds up what was communicated, on links or by the device, per mesh
    axis."""

    acts: tuple[Act, ...]
    sendings: tuple[Sending, ...]
    launches: tuple[Span, ...]
    axes: Mapping[int, AxisTime]


class Hardware:
    """A device, its host and the links of each mesh axis, at work.

    `contention` has, per axis in thousandths (at most all of them), by how much the device and a
    message are slowed down while both are busy (`mesh.Link.contention`): together they take `max +
    k min`. Axes that are not in it have none.

    Time that the device loses is exposed time of a message. While the device waits, it is that of
    the message that the links send, on the axis of the awaited one. While it is slowed down, it is
    shared by all messages in flight, in proportion to `contention`. The exposed time of a message
    is no more than it takes alone. These are fractions of nanoseconds: `apportion` makes them whole
    numbers with the same sum.
    """

    def __init__(self, contention: Sequence[int] = ()) -> None:
        self.worked_ns = 0
        """What the device was given to do, but for communication."""
        self._now = 0.0
        self._waited_for_host = 0.0
        self._slowed = {axis: k / _THOUSAND for axis, k in enumerate(contention)}
        self._queues: dict[int, deque[_Sent]] = {}
        self._sent: list[_Sent] = []
        self._acts: list[Act] = []
        self._launches: list[Span] = []
        self._own: dict[int, int] = {}
        """What the device itself communicates, per axis."""

    @property
    def now_ns(self) -> int:
        """Where the device is."""
        return round(self._now)

    @property
    def exposed_ns(self) -> int:
        """How long the device was not at its own work, or slower at it, for communication."""
        return self.now_ns - self.worked_ns - self.exposed_host_ns

    @property
    def exposed_host_ns(self) -> int:
        """How long the device waited for its host."""
        return round(self._waited_for_host)

    def launch(self, ns: int) -> Span | None:
        """The host launches what comes next, as soon as it has launched what came before, and the
        device waits for that. A step begins when its first launch is over. Returns when the device
        waits, if it does."""
        done_ns = self._launches[-1].end_ns if self._launches else -ns
        launched = Span(max(0, done_ns), done_ns + ns)
        self._launches.append(launched)
        left = launched.end_ns - self._now
        if left <= 0:
            return None
        self._waited_for_host += left
        span = self._pass(left, {})
        self._acts.append(Act(span, launched=len(self._launches) - 1))
        return span

    def work(self, ns: int) -> Span:
        """The device is busy."""
        self.worked_ns += ns
        span = self._pass(float(ns), self._slowed)
        self._acts.append(Act(span))
        return span

    def communicate(self, axis: int, ns: int) -> Span:
        """The device is busy with what only communication on `axis` asks for."""
        self._own[axis] = self._own.get(axis, 0) + ns
        span = self._pass(float(ns), {})
        self._acts.append(Act(span, axis))
        return span

    def start(self, axis: int, ns: int) -> int:
        """The links of an axis are given a message. Returns its number."""
        queue = self._queues.setdefault(axis, deque())
        behind = queue[-1].number if queue else None
        number, before = len(self._sent), len(self._acts)
        self._sent.append(_Sent(number, axis, ns, before, behind, float(ns), self._now))
        queue.append(self._sent[-1])
        return number

    def wait(self, number: int) -> Span:
        """The device goes on when a message has come."""
        start_ns, awaited = self.now_ns, self._sent[number]
        queue = self._queues[awaited.axis]
        while awaited.span is None:
            sending = queue[0]
            sending.exposed += self._step(inf, {})
        span = Span(start_ns, self.now_ns)
        self._acts.append(Act(span, awaited=number))
        return span

    def mark(self) -> Mark | None:
        """The state of the device now; None if messages are in flight."""
        if any(self._queues.values()):
            return None
        ahead = self._now - self._launches[-1].end_ns if self._launches else 0.0
        return Mark(self._now, self.worked_ns, self._waited_for_host, ahead, dict(self._own))

    def repeat(self, since: Mark, until: Mark, times: int) -> float:
        """Let the time between two marks pass so many `times` more, without a record of what is
        done. Returns the nanoseconds of one time."""
        passed = until.now - since.now
        self._now += times * passed
        self.worked_ns += times * (until.worked_ns - since.worked_ns)
        self._waited_for_host += times * (until.waited - since.waited)
        for axis, ns in until.own.items():
            self._own[axis] += times * (ns - since.own.get(axis, 0))
        if self._launches:
            end_ns = round(self._now - until.ahead)
            self._launches.append(Span(end_ns, end_ns))
        return passed

    def span_of(self, number: int) -> Span:
        """When a message was sent. One that nothing waited for may end after the device does."""
        sent, now = self._sent[number], self._now
        while sent.span is None:
            self._step(inf, {})
        self._now = now
        return sent.span

    def finish(self) -> Record:
        """All that was done."""
        for number in range(len(self._sent)):
            self.span_of(number)
        exposed_ns = apportion(
            self.exposed_ns - sum(self._own.values()), [each.exposed for each in self._sent]
        )
        sendings = tuple(
            Sending(sent.axis, sent.alone_ns, ns, sent.span, sent.before, sent.behind)
            for sent, ns in zip(self._sent, exposed_ns, strict=True)
            if sent.span is not None
        )
        axes = {axis: AxisTime(ns, ns) for axis, ns in self._own.items()}
        for each in sendings:
            alone_ns, exposed = axes.get(each.axis, AxisTime(0, 0))
            axes[each.axis] = AxisTime(alone_ns + each.alone_ns, exposed + each.exposed_ns)
        return Record(tuple(self._acts), sendings, tuple(self._launches), axes)

    def _pass(self, left: float, slowed: Mapping[int, float]) -> Span:
        start_ns = self.now_ns
        while left > 0:
            left -= self._step(left, slowed)
        return Span(start_ns, self.now_ns)

    def _step(self, left: float, slowed: Mapping[int, float]) -> float:
        """Time passes until the device has done `left`, or a message has come. Returns what the
        device has done."""
        busy = {axis: queue for axis, queue in self._queues.items() if queue}
        if not busy:
            self._now += left
            return left
        rate = 1 / (1 + sum(slowed.get(axis, 0.0) for axis in busy))
        rates = {axis: 1 / (1 + slowed.get(axis, 0.0)) for axis in busy}
        ends = {axis: queue[0].left / rates[axis] for axis, queue in busy.items()}
        passed = min([left / rate, *ends.values()])
        self._now += passed
        for axis, queue in busy.items():
            first = queue[0]
            first.left -= passed * rates[axis]
            first.exposed += passed * rate * slowed.get(axis, 0.0)
            if ends[axis] <= passed:
                queue.popleft()
                first.span = Span(round(first.start), self.now_ns)
                if queue:
                    queue[0].start = self._now
        return left if left / rate <= passed else passed * rate


@dataclass(slots=True)
class _Sent:
    """A message: of `alone_ns`, the links have `left` to do. They begin with it at `start`, or when
    those before it have come. Further as `Sending` has it."""

    number: int
    axis: int
    alone_ns: int
    before: int
    behind: int | None
    left: float
    start: float
    exposed: float = 0.0
    span: Span | None = None


# The critical path: what determines when the device is done.


class Leg(NamedTuple):
    """A stretch of the path, in which something is done from its start to its end: act `number` of
    the device, the message of that number, or that launch of the host."""

    span: Span
    by: Literal["device", "links", "host"]
    number: int


def critical_path(record: Record) -> tuple[Leg, ...]:
    """The path of what was done: legs from 0 to the end of the last act, each of which begins when
    the one before it ends, and because of that.

    The path is followed backwards from the end. Before an act of the device there is its previous
    act, unless the device waited. If it waited, the path goes on with the awaited message, then
    with the one before it in the queue, and so on up to one that found the links idle; the device
    had started that. The host waits for nobody: before a launch there are only launches. Slowing
    down is no leg of its own: a leg takes as long as it did on the clock.
    """
    legs: list[Leg] = []
    place = len(record.acts) - 1
    while place >= 0:
        span, _, number, launched = record.acts[place]
        if span.start_ns < span.end_ns and launched is not None:
            legs += (Leg(record.launches[k], "host", k) for k in range(launched, -1, -1))
            break
        if span.start_ns == span.end_ns or number is None:
            legs.append(Leg(span, "device", place))
            place -= 1
            continue
        while number is not None:
            sending = record.sendings[number]
            legs.append(Leg(sending.span, "links", number))
            place, number = sending.num_before - 1, sending.behind
    return tuple(leg for leg in reversed(legs) if leg.span.start_ns < leg.span.end_ns)
