"""How long the parts of a step take that a pipeline puts in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autopar.cost_model.moves import to_ns
from autopar.ir.mesh import Device
from autopar.ir.schedule import Schedule, Start
from autopar.ir.timeline import Timeline
from autopar.plans.estimates import MicrobatchTimes, StageEstimates

_LAUNCHES_PER_ACTION = 40
"""What a stage's action takes its host beside its ops, to find what was sent and to send what was
made: 0.3 ms where an op is called in 7 to 8 us (ADR 33)."""


def arrivals(timeline: Timeline) -> list[int]:
    """When the device comes to each event, and to the end. A message starts when the device says
    so, whenever its links are free."""
    ends = (
        0 if isinstance(event, Start) else span.end_ns
        for event, span in zip(timeline.events, timeline.spans, strict=True)
    )
    return list(accumulate(ends, max, initial=0))


def launched_ns(estimates: StageEstimates, device: Device) -> int:
    """What the launches of a step take on `device`, however little its ops do."""
    kernels = sum(op.count for op in estimates.ops.values() if op.compute_ns)
    return estimates.host_ns + kernels * to_ns(device.floor_s(0.0))


def microbatch_times(scheduled: Schedule, timeline: Timeline, device: Device) -> MicrobatchTimes:
    """Those of a step that was played on `device`, of the last turn and the one before. The host of
    a GPU is ahead of it, and takes nothing of its time for an action."""
    marks, start = (
        arrivals(timeline),
        (scheduled.microbatches - 1) * len(scheduled.microbatch_before),
    )
    last = usual = _lengths(scheduled, marks, start)
    if scheduled.before is not None:
        usual = _lengths(scheduled.before, marks, start - len(scheduled.microbatch_before))
    return MicrobatchTimes(
        forward_ns=usual[0],
        backward_ns=usual[1],
        weights_ns=usual[2],
        last_forward_ns=last[0],
        last_backward_ns=last[1],
        last_weights_ns=last[2],
        update_ns=last[3],
        action_ns=_LAUNCHES_PER_ACTION * to_ns(device.floor_s(0.0)),
    )


def parts_of_microbatch(microbatch: Schedule, start: int) -> list[tuple[int, int]]:
    """The events of forward, of both parts of backward, and of the update, of a turn that begins
    with event `start`: the first, and the one behind the last."""
    parts = microbatch.forward, microbatch.backward, microbatch.weights, microbatch.update
    return [*pairwise(accumulate(map(len, parts), initial=start))]


def _lengths(microbatch: Schedule, marks: Sequence[int], start: int) -> list[int]:
    """What the parts of a turn take that begins with event `start`."""
    return [marks[b] - marks[a] for a, b in parts_of_microbatch(microbatch, start)]
