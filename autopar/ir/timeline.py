"""A schedule simulated: when each of its events starts and ends, and what a device holds meanwhile.

`hardware` gives the times of the events, this module the memory that they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autopar.ir.hardware import Hardware, Mark, Span
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

HOLDERS = ("unsharded", "saved", "transient")
"""The kinds of memory beside parameters, their gradients and the optimizer's states."""


class Carried(NamedTuple):
    """Bytes of a message: `filling` of copies while its buffer is filled, `sent` of that buffer
    until the message has come, and `brought` of what it brings. `sent` is 0 where the source itself
    is sent, or reduced in place."""

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

    def inside(self, node: int) -> Sequence[tuple[int, int]]:
        """Per message that an op sends while it runs: the mesh axis, and the time it adds."""
        ...

    def message_ns(self, message: Message) -> int:
        """How long the links are busy with it, and the copies that lay out its buffers."""
        ...

    def cut_ns(self, transfer: Transfer) -> int:
        """How long the device cuts a slice."""
        ...

    def update_ns(self, params: Sequence[int]) -> int:
        """How long the optimizer takes."""
        ...

    def host_ns(self, event: Event) -> int:
        """How long the host takes to launch it."""
        ...

    def held(self, value: Value) -> tuple[str, int]:
        """The holder of a tensor, and its bytes."""
        ...

    def carried(self, message: Message) -> Carried:
        """The buffers of a message."""
        ...

    def is_copied(self, transfer: Transfer, message: Message) -> bool:
        """Whether the transfer's target is a copy of a part of what the message brought, and not
        that part itself."""
        ...

    def scratch(self, node: int) -> int:
        """Bytes that an op holds beside its inputs and outputs."""
        ...


class Occupant(NamedTuple):
    """What takes `num_bytes` for a holder: a tensor, a message's buffers, or what an event needs
    while it happens."""

    what: Value | Message | Event
    holder: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """`spans[k]` and `live[k]` are those of event k. A span is the device's, but for a `Start` that
    of the links. `live` has the bytes of each of `HOLDERS` during the event. `exposed_ns` is what
    communication costs the device, in all, `exposed_host_ns` how long it waits for its host."""

    events: tuple[Event, ...]
    spans: tuple[Span, ...]
    live: tuple[tuple[int, int, int], ...]
    exposed_ns: int
    exposed_host_ns: int
    end_ns: int
    repeated: range = range(0)
    """The events of microbatches that pass as the one before them, and are not simulated one by
    one."""

    @property
    def simulated(self) -> list[int]:
        """The numbers of the events that were simulated one by one."""
        return [*range(self.repeated.start), *range(self.repeated.stop, len(self.events))]

    @property
    def peak(self) -> int:
        """The number of the first event at which most is held. Those that are repeated hold what
        others held before them."""
        return max(self.simulated, key=lambda k: sum(self.live[k]), default=0)


def simulate_events(
    events: Sequence[Event],
    given: Sequence[Value],
    prices: Prices,
    microbatch: int = 0,
    microbatches: int = 0,
) -> Timeline:
    """The timeline of `events`, where the tensors `given` are there from the start. The events may
    begin with `microbatches` times the same `microbatch` events: once a microbatch passes as the
    one before it, so do all."""
    player = _Simulator(events, given, prices)
    if microbatch:
        player.repeat(microbatch, microbatches)
    player.go_on(len(events))
    return player.timeline()


class _Simulator:
    """What has happened of `events`: spans, and the numbers of the messages that were started."""

    def __init__(self, events: Sequence[Event], given: Sequence[Value], prices: Prices) -> None:
        self.events = events
        self.time, self.memory = _Time(prices), _Memory(prices, given)
        self.happened: list[Span | int] = []
        self.live: list[tuple[int, int, int]] = []
        self.repeated = range(0)

    def go_on(self, end: int) -> None:
        """Simulate all events up to number `end`."""
        for event in self.events[len(self.happened) : end]:
            self.happened.append(self.time.do(event))
            self.live.append(self.memory.do(event))

    def repeat(self, microbatch: int, microbatches: int) -> None:
        """Simulate `microbatches` times `microbatch` events."""
        hardware, before = self.time.hardware, None
        for left in range(microbatches - 1, -1, -1):
            start = len(self.happened)
            self.go_on(start + microbatch)
            now = hardware.mark()
            if left and before and now and self._is_steady(before, now, microbatch):
                self._shift(start, hardware.repeat(before, now, left), left)
                return
            before = now

    def _is_steady(self, before: Mark, now: Mark, microbatch: int) -> bool:
        """Whether a microbatch that begins at `now` passes like the one that began at `before`."""
        # A device that did not wait for its host in a whole microbatch has only gained on it.
        is_host_alike = now.waited == before.waited or now.ahead == before.ahead
        return is_host_alike and self.live[-microbatch:] == self.live[-2 * microbatch : -microbatch]

    def _shift(self, start: int, passed: float, times: int) -> None:
        """Repeat what has happened since event `start` so many `times`."""
        happened, live = [*map(self._span, self.happened[start:])], self.live[start:]
        for k in range(1, times + 1):
            by = round(k * passed)
            self.happened += [Span(first + by, last + by) for first, last in happened]
            self.live += live
        self.repeated = range(len(self.happened) - times * len(live), len(self.happened))

    def timeline(self) -> Timeline:
        """The timeline, once all events have happened."""
        hardware = self.time.hardware
        return Timeline(
            tuple(self.events),
            tuple(map(self._span, self.happened)),
            tuple(self.live),
            hardware.exposed_ns,
            hardware.exposed_host_ns,
            hardware.now_ns,
            self.repeated,
        )

    def _span(self, what: Span | int) -> Span:
        return what if isinstance(what, Span) else self.time.hardware.span_of(what)


def held_at_peak(
    timeline: Timeline, given: Sequence[Value], prices: Prices
) -> tuple[Occupant, ...]:
    """What is held at the peak of a timeline that was simulated with these prices."""
    memory, place = _Memory(prices, given), timeline.peak
    for number in range(place):
        if number not in timeline.repeated:
            memory.do(timeline.events[number])
    return memory.during(timeline.events[place]) if timeline.events else ()


class _Time:
    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.hardware = Hardware(prices.contention)
        self.numbers: dict[Message, int] = {}

    def do(self, event: Event) -> Span | int:
        """When the event happens; of a `Start`, the number of its message."""
        hardware, prices = self.hardware, self.prices
        if host_ns := prices.host_ns(event):
            hardware.launch(host_ns)
        match event:
            case Compute(node):
                start_ns, end_ns = hardware.work(prices.compute_ns(node))
                for axis, ns in prices.inside(node):
                    end_ns = hardware.communicate(axis, ns).end_ns
                return Span(start_ns, end_ns)
            case Start(message):
                number = hardware.start(message.axis, prices.message_ns(message))
                self.numbers[message] = number
                return number
            case Wait(message):
                return hardware.wait(self.numbers.pop(message))
            case Take(transfer, None):
                return hardware.communicate(transfer.collective.axis, prices.cut_ns(transfer))
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
        """Per message, the tensors that are parts of what it brought: all of them if nothing reads
        the message any more, else those so far."""
        self.part_of: dict[Value, Message] = {}
        self.done = set[Message]()
        for value in given:
            self._hold(value, *prices.held(value))

    def do(self, event: Event) -> tuple[int, int, int]:
        """Bytes of each of `HOLDERS` during `event`; of a `Free`, after it."""
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
        held = [Occupant(what, holder, size) for what, (holder, size) in self.held.items()]
        return (*held, Occupant(event, "transient", meanwhile)) if meanwhile else tuple(held)

    def _enter(self, event: Event) -> int:
        """Hold what an event makes. Returns the bytes that the event needs beside, while it
        lasts."""
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
                self.done.discard(message)
                self.parts.pop(message, None)
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
        """Change the bytes of a message. Of what it brought, each part is held by the tensor that
        is this part, as long as that tensor is there."""
        holder, size = self.held.pop(message)
        self.sums[holder] -= size
        self._hold(message, holder, size + by)

    def _drop(self, what: Value | Message) -> int:
        holder, size = self.held.pop(what)
        self.sums[holder] -= size
        return size
