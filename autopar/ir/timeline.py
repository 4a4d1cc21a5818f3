"""A schedule played: when each of its events starts and ends, and what a device holds meanwhile.

The device does one thing after another; the links of each mesh axis do theirs beside it, in the
order in which they are started. What communication costs the device is exposed, whether it waits or
is slowed down; the rest is hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from autopar.ir.schedule import (
    Compute,
    Event,
    Free,
    Message,
    Start,
    Take,
    Transfer,
    Update,
    Value,
    Wait,
)

_THOUSAND = 1000

HOLDERS = ("kept", "saved", "transient")
"""What memory beside parameters, their gradients and the optimizer's states is held for."""


class Carried(NamedTuple):
    """Bytes that a message takes: of copies while its buffer is filled, of that buffer until it has
    come (0 where the source itself is sent, or reduced where it is), and of what it brings."""

    filling: int
    sent: int
    brought: int


class Prices(Protocol):
    """What events take, in nanoseconds, and what is held, in bytes."""

    @property
    def contention(self) -> Sequence[int]:
        """Per mesh axis, in thousandths: as `Hardware` has it."""
        ...

    def compute_ns(self, node: int) -> int:
        """The op's own time."""
        ...

    def inside_ns(self, node: int) -> int:
        """By how much what an op sends while it runs makes it longer."""
        ...

    def message_ns(self, message: Message) -> int:
        """How long the links are busy with it, with the copies that lay out its buffers."""
        ...

    def cut_ns(self, transfer: Transfer) -> int:
        """How long the device cuts a slice."""
        ...

    def update_ns(self, params: Sequence[int]) -> int:
        """How long the optimizer takes."""
        ...

    def held(self, value: Value) -> tuple[str, int]:
        """The holder of a tensor, and its bytes."""
        ...

    def carried(self, message: Message) -> Carried:
        """The buffers of a message."""
        ...

    def is_copied(self, transfer: Transfer, message: Message) -> bool:
        """Whether what it brings is a copy of a part of what the message brought, not that part."""
        ...

    def scratch(self, node: int) -> int:
        """What an op holds beside its inputs and outputs."""
        ...


class Span(NamedTuple):
    """When an event starts and ends, in nanoseconds: of a `Start` on its links, of all others on
    the device."""

    start_ns: int
    end_ns: int


class Occupant(NamedTuple):
    """What takes `num_bytes` for a holder: a tensor, a message's buffers, or what an event needs
    while it happens."""

    what: Value | Message | Event
    holder: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """`spans` and `live`, the bytes of each of `HOLDERS` while it happens, per event. `exposed_ns`
    is what communication costs the device, in all."""

    events: tuple[Event, ...]
    spans: tuple[Span, ...]
    live: tuple[tuple[int, int, int], ...]
    exposed_ns: int
    end_ns: int

    @property
    def peak(self) -> int:
        """The first event at which most is held."""
        sums = [sum(each) for each in self.live]
        return sums.index(max(sums)) if sums else 0


def play(events: Sequence[Event], given: Sequence[Value], prices: Prices) -> Timeline:
    """`events` in order, where the tensors `given` are there from the start."""
    time, memory = _Time(prices), _Memory(prices, given)
    happened: list[Span | int] = []
    live: list[tuple[int, int, int]] = []
    for event in events:
        happened.append(time.do(event))
        live.append(memory.do(event))
    hardware = time.hardware
    sent = hardware.finish()
    spans = (each if isinstance(each, Span) else sent[each] for each in happened)
    return Timeline(tuple(events), tuple(spans), tuple(live), hardware.exposed_ns, hardware.now_ns)


def held_at(
    events: Sequence[Event], given: Sequence[Value], prices: Prices, place: int
) -> tuple[Occupant, ...]:
    """What is held at event `place`."""
    memory = _Memory(prices, given)
    for event in events[:place]:
        memory.do(event)
    return memory.during(events[place]) if events else ()


class Hardware:
    """A device and the links of each mesh axis, at work.

    `contention` has, per axis in thousandths, by how much the device and a message are slowed down
    while both are busy (`mesh.Link.contention`): together they take `max + k min`. Axes that are
    not in it have none.
    """

    def __init__(self, contention: Sequence[int] = ()) -> None:
        self.worked_ns = 0
        """What the device was given to do, but for communication."""
        self._now = 0.0
        self._slowed = {axis: k / _THOUSAND for axis, k in enumerate(contention)}
        self._queues: dict[int, deque[_Sent]] = {}
        self._spans: list[Span | None] = []

    @property
    def now_ns(self) -> int:
        """Where the device is."""
        return round(self._now)

    @property
    def exposed_ns(self) -> int:
        """How long the device was not at its own work, or slower at it, for communication."""
        return self.now_ns - self.worked_ns

    def work(self, ns: int) -> Span:
        """The device is busy."""
        self.worked_ns += ns
        return self._pass(float(ns), self._slowed)

    def communicate(self, ns: int) -> Span:
        """The device is busy with what only communication asks for."""
        return self._pass(float(ns), {})

    def start(self, axis: int, ns: int) -> int:
        """The links of an axis are given a message. Returns its number."""
        queue = self._queues.setdefault(axis, deque())
        number = len(self._spans)
        self._spans.append(None)
        queue.append(_Sent(number, float(ns), self._now))
        return number

    def wait(self, number: int) -> Span:
        """The device goes on when a message has come."""
        start = self.now_ns
        while self._spans[number] is None:
            self._step(inf, {})
        return Span(start, self.now_ns)

    def finish(self) -> list[Span]:
        """From when to when the links were at each message, by its number; those that nothing
        waited for end after the device does."""
        now = self._now
        while any(self._queues.values()):
            self._step(inf, {})
        self._now = now
        return [span for span in self._spans if span is not None]

    def _pass(self, left: float, slowed: Mapping[int, float]) -> Span:
        start = self.now_ns
        while left > 0:
            left -= self._step(left, slowed)
        return Span(start, self.now_ns)

    def _step(self, left: float, slowed: Mapping[int, float]) -> float:
        """Time passes until the device has done `left`, or a message has come. Returns what the
        device has done."""
        busy = {axis: queue for axis, queue in self._queues.items() if queue}
        rate = 1 / (1 + sum(slowed.get(axis, 0.0) for axis in busy))
        rates = {axis: 1 / (1 + slowed.get(axis, 0.0)) for axis in busy}
        ends = {axis: queue[0].left / rates[axis] for axis, queue in busy.items()}
        passed = min([left / rate, *ends.values()])
        self._now += passed
        for axis, queue in busy.items():
            first = queue[0]
            first.left -= passed * rates[axis]
            if ends[axis] <= passed:
                queue.popleft()
                self._spans[first.number] = Span(round(first.start), self.now_ns)
                if queue:
                    queue[0].start = self._now
        return left if left / rate <= passed else passed * rate


@dataclass(slots=True)
class _Sent:
    """A message that has not come: the links have `left` nanoseconds to do, and begin with it at
    `start`, or when those before it have come."""

    number: int
    left: float
    start: float


class _Time:
    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.hardware = Hardware(prices.contention)
        self.numbers: dict[Message, int] = {}

    def do(self, event: Event) -> Span | int:
        """When the event happens; of a `Start`, the number of its message."""
        hardware, prices = self.hardware, self.prices
        match event:
            case Compute(node):
                span = hardware.work(prices.compute_ns(node))
                return Span(span.start_ns, hardware.communicate(prices.inside_ns(node)).end_ns)
            case Start(message):
                number = hardware.start(message.axis, prices.message_ns(message))
                self.numbers[message] = number
                return number
            case Wait(message):
                return hardware.wait(self.numbers.pop(message))
            case Take(transfer, None):
                return hardware.communicate(prices.cut_ns(transfer))
            case Update(params):
                return hardware.work(prices.update_ns(params))
            case _:
                return hardware.work(0)


class _Memory:
    def __init__(self, prices: Prices, given: Sequence[Value]) -> None:
        self.prices = prices
        self.held: dict[Value | Message, tuple[str, int]] = {}
        self.sums: dict[str, int] = dict.fromkeys(HOLDERS, 0)
        self.parts: dict[Message, set[Value]] = {}
        """Of a message that nothing reads any more, the tensors that are parts of what it brought;
        of others, so far."""
        self.part_of: dict[Value, Message] = {}
        self.done = set[Message]()
        for value in given:
            self._hold(value, *prices.held(value))

    def do(self, event: Event) -> tuple[int, int, int]:
        """What is held while `event` happens; of what is freed, afterwards."""
        most = self._enter(event)
        if isinstance(event, Free):
            self._leave(event)
        kept, saved, transient = self.sums.values()
        if not isinstance(event, Free):
            self._leave(event)
        return kept, saved, transient + most

    def during(self, event: Event) -> tuple[Occupant, ...]:
        """What is held while `event` happens, one by one."""
        meanwhile = self._enter(event)
        found = [Occupant(what, holder, size) for what, (holder, size) in self.held.items()]
        return (*found, Occupant(event, "transient", meanwhile)) if meanwhile else tuple(found)

    def _enter(self, event: Event) -> int:
        """What comes to be held with an event; what it needs beside that, and while it lasts."""
        match event:
            case Compute(node):
                for value in event.makes:
                    self._hold(value, *self.prices.held(value))
                return self.prices.scratch(node)
            case Start(message):
                filling, sent, brought = self.prices.carried(message)
                # What is copied may be gone before anything comes.
                at_first = (sent or brought) if message.is_packed else brought
                self._hold(message, "transient", at_first)
                return filling
            case Take(transfer, message):
                value = transfer.target
                self._hold(value, *self.prices.held(value))
                if message is not None and not self.prices.is_copied(transfer, message):
                    self.part_of[value] = message
                    self.parts.setdefault(message, set()).add(value)
                    self._resize(message, -self.held[value][1])
            case _:
                pass
        return 0

    def _leave(self, event: Event) -> None:
        match event:
            case Start(message) if message.is_packed:
                _, sent, brought = self.prices.carried(message)
                self._resize(message, sent + brought - (sent or brought))
            case Wait(message):
                self._drop(message)
                self._hold(message, "transient", self.prices.carried(message).brought)
            case Free(dead):
                for each in dead:
                    self._free(each)
            case _:
                pass

    def _free(self, dead: Value | Message) -> None:
        if isinstance(dead, Message):
            self.done.add(dead)
            if not self.parts.get(dead):
                self._drop(dead)
            return
        size = self._drop(dead)
        message = self.part_of.pop(dead, None)
        if message is not None:
            self._resize(message, size)
            self.parts[message].discard(dead)
            if message in self.done and not self.parts[message]:
                self._drop(message)

    def _hold(self, what: Value | Message, holder: str, size: int) -> None:
        self.held[what] = holder, size
        self.sums[holder] += size

    def _resize(self, message: Message, by: int) -> None:
        """What a message brought is held for its parts, one by one, while they are there."""
        holder, size = self.held.pop(message)
        self.sums[holder] -= size
        self._hold(message, holder, size + by)

    def _drop(self, what: Value | Message) -> int:
        holder, size = self.held.pop(what)
        self.sums[holder] -= size
        return size
