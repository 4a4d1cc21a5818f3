"""When nothing reads a tensor any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.ir.schedule import (
    Compute,
    Event,
    Free,
    Message,
    Schedule,
    Start,
    Take,
    Value,
    Wait,
)


def with_frees(given: Schedule) -> Schedule:
    """`given` with what is freed behind each event that is the last to need it."""
    lasts: dict[Value | Message, int] = {}
    events = given.forward + given.backward + given.weights
    made = set[Value | Message]()
    for place, event in enumerate(events):
        for held in _made(event):
            made.add(held)
            lasts[held] = place
        for held in _read(event):
            lasts[held] = place
    made -= given.outputs
    dead: dict[int, list[Value | Message]] = defaultdict(list)
    for held, place in lasts.items():
        if held in made:
            dead[place].append(held)

    def freed(first: int, phase: Sequence[Event]) -> Iterator[Event]:
        for place, event in enumerate(phase, first):
            yield event
            if place in dead:
                yield Free(tuple(dead[place]))

    first, second = len(given.forward), len(given.forward) + len(given.backward)
    return replace(
        given,
        forward=tuple(freed(0, given.forward)),
        backward=tuple(freed(first, given.backward)),
        weights=tuple(freed(second, given.weights)),
    )


def needed_by(events: Sequence[Event], left: Iterable[Value]) -> tuple[Value, ...]:
    """The tensors that `events` read, or are to be `left` behind them, and are not made by them."""
    read: dict[Value, None] = {}
    made = set[Value | Message]()
    for event in events:
        read |= dict.fromkeys(x for x in _read(event) if isinstance(x, Value) and x not in made)
        made.update(_made(event))
    return tuple(read | dict.fromkeys(value for value in left if value not in made))


def _made(event: Event) -> Sequence[Value | Message]:
    match event:
        case Compute():
            return event.makes
        case Start(message):
            return (message,)
        case Take(transfer):
            return (transfer.target,)
        case _:
            return ()


def _read(event: Event) -> Sequence[Value | Message]:
    """A collective reads what is not copied for it until it has come."""
    match event:
        case Compute():
            return event.reads
        case Start(message):
            return [transfer.source for transfer in message.transfers]
        case Wait(message):
            sources = [transfer.source for transfer in message.transfers]
            return [message] if message.is_packed else [message, *sources]
        case Take(transfer, message):
            return (message or transfer.source,)
        case _:
            return ()
