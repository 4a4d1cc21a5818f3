"""The critical path: what determines when the device is done."""

from __future__ import annotations

from typing import Literal, NamedTuple

from autopar.ir.hardware import Record, Span


class Leg(NamedTuple):
    """A stretch of the path, in which something is done from its start to its end: act `number` of
    the device, the message of that number, or that launch of the host."""

    span: Span
    by: Literal["device", "links", "host"]
    number: int


def critical_path(record: Record) -> tuple[Leg, ...]:
    """The path of what was done: legs from 0 to the end of the last act, each of which begins when
    the one before it ends, and because of that.

    Backwards from the end: before what the device does, it did something else, unless it waited.
    Where it did, the message it waited for was on its way; before that the message in whose queue
    it was, and so on up to one that found the links idle, which the device had started. The host
    waits for nobody: before a launch there are only launches. What slows another thing down is not
    a leg of its own: a leg takes as long as it did on the clock.
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
