"""How long the parts of a step take that a pipeline puts in an order of its own."""

from __future__ import annotations

from itertools import accumulate

from autopar.ir.schedule import Schedule, Start
from autopar.ir.timeline import Timeline
from autopar.plans.estimates import TurnTimes


def arrivals(played: Timeline) -> list[int]:
    """When the device comes to each event, and to the end. A message starts when the device says
    so, whenever its links are free."""
    ends = (
        0 if isinstance(event, Start) else span.end_ns
        for event, span in zip(played.events, played.spans, strict=True)
    )
    return list(accumulate(ends, max, initial=0))


def turn_times(scheduled: Schedule, played: Timeline) -> TurnTimes:
    """Those of a step that was played, of the last turn and the one before."""
    marks, others = arrivals(played), scheduled.turns - 1
    before = scheduled.before or scheduled
    start = others * len(scheduled.turn_before)
    first = start - len(scheduled.turn_before)
    middle = first + len(before.forward) if others else start + len(scheduled.forward)
    update = start + len(scheduled.forward) + len(scheduled.backward)
    return TurnTimes(
        forward_ns=marks[middle] - marks[first],
        backward_ns=marks[start if others else update] - marks[middle],
        last_forward_ns=marks[start + len(scheduled.forward)] - marks[start],
        last_backward_ns=marks[update] - marks[start + len(scheduled.forward)],
        update_ns=marks[-1] - marks[update],
    )
