"""The critical path: what determines when the device is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.ir.hardware import Act, Sending, Span


class Leg(NamedTuple):
    """A stretch of the path, in which something is done from its start to its end: act `number` of
    the device, or the message of that number."""

    span: Span
    is_sent: bool
    number: int


def critical_path(acts: Sequence[Act], sendings: Sequence[Sending]) -> tuple[Leg, ...]:
    """The path of `hardware.Record`: legs from 0 to the end of the last act, each of which begins
    when the one before it ends, and because of that.

    Backwards from the end: before what the device does, it did something else, unless it waited.
    Where it did, the message it waited for was on its way; before that the message in whose queue
    it was, and so on up to one that found the links idle, which the device had started. What slows
    another thing down is not a leg of its own: a leg takes as long as it did on the clock.
    """
    legs: list[Leg] = []
    place = len(acts) - 1
    while place >= 0:
        span, _, number = acts[place]
        if span.start_ns == span.end_ns or number is None:
            legs.append(Leg(span, False, place))
            place -= 1
            continue
        while number is not None:
            legs.append(Leg(sendings[number].span, True, number))
            place, number = sendings[number].num_before - 1, sendings[number].behind
    return tuple(leg for leg in reversed(legs) if leg.span.start_ns < leg.span.end_ns)
