"""Memory over a simulated step, and the times of its parts, for the plan file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from autopar.cost_model.event_prices import EventPrices
from autopar.cost_model.moves import to_ns
from autopar.cost_model.optimizer import ParamMemory
from autopar.ir.blocks import WindowPlace, blocks_of
from autopar.ir.graph import Graph, Ref, Role
from autopar.ir.mesh import Device, Mesh
from autopar.ir.own_ops import is_result
from autopar.ir.peak_candidates import PeakCandidate, is_peak_candidate, peak_candidate_of
from autopar.ir.pipeline import Pass, Waiting
from autopar.ir.problem import IntArray
from autopar.ir.schedule import Compute, Schedule, Start, Update, Value
from autopar.ir.timeline import HOLDERS, Occupant, Timeline, held_at_peak
from autopar.plans.estimates import (
    Held,
    HeldBytes,
    Memory,
    MemoryCurve,
    MicrobatchMemory,
    MicrobatchTimes,
)
from autopar.plans.layout import Layout
from autopar.plans.requests.request import PlanRequest

MAX_CURVE_POINTS = 128
MAX_HELD = 24
IN_FLIGHT = "(messages)"


def waiting_bytes(
    scheduled: Schedule, prices: EventPrices, others: Sequence[Waiting]
) -> tuple[int, int]:
    """Bytes that other microbatches in flight hold: of unsharded parameters, and of saved tensors.
    Of the alternatives in `others`, the one with the largest sum counts."""
    microbatch = scheduled if scheduled.before is None else scheduled.before
    whole, rest = _held(microbatch.saved, prices), _held(microbatch.carried, prices)
    totals = [
        tuple(each.backward * a + each.weights * b for a, b in zip(whole, rest, strict=True))
        for each in others
    ]
    unsharded, saved = max(totals, key=sum)
    return unsharded, saved


def microbatch_memory(
    scheduled: Schedule, timeline: Timeline, prices: EventPrices
) -> MicrobatchMemory:
    """Bytes held in each part of a microbatch, and by each microbatch that waits."""
    parts: dict[tuple[Pass, bool], HeldBytes] = {}
    start = len(timeline.events) - len(scheduled.last_microbatch)
    usual = scheduled.before
    microbatches = [(True, scheduled, start)]
    if usual is not None:
        microbatches.append((False, usual, start - len(scheduled.microbatch_before)))
    for is_last, microbatch, first in microbatches:
        *places, (_, end) = parts_of_microbatch(microbatch, first)
        for kind, (a, b) in zip(Pass, places, strict=True):
            # The optimizer's memory counts for the part before it.
            live = timeline.live[a : end if b == places[-1][1] else b]
            parts[kind, is_last] = HeldBytes(*max(live, key=sum, default=(0, 0, 0)))
    microbatch = scheduled if usual is None else usual
    waiting = {
        kind: HeldBytes(*_held(values, prices))
        for kind, values in ((Pass.BACKWARD, microbatch.saved), (Pass.WEIGHTS, microbatch.carried))
    }
    return MicrobatchMemory(parts, waiting, sum(prices.held(value)[1] for value in prices.given()))


def _held(values: Sequence[Value], prices: EventPrices) -> tuple[int, int]:
    """Bytes that a microbatch hands on to a later part of it: of unsharded parameters, and of all
    else but what is in memory all the time."""
    by_holder: dict[str, int] = dict.fromkeys(HOLDERS, 0)
    for value in values:
        root = prices.graph.nodes[value.ref.node]
        is_copy = root.role is Role.PARAM and value.state != prices.layout.output_state(value.ref)
        if root.role is Role.OP or is_copy:
            holder, num_bytes = prices.held(value)
            by_holder[holder] += num_bytes
    return by_holder["unsharded"], by_holder["saved"] + by_holder["transient"]


def peak_memory(
    timeline: Timeline,
    prices: EventPrices,
    layout: Layout,
    request: PlanRequest,
    waiting: tuple[int, int],
) -> tuple[Memory, tuple[Held, ...]]:
    """Memory at the peak: by holder, and the largest classes of tensors.

    Parameters, their gradients and optimizer states are in memory all the time (`ParamMemory`), and
    so are the `waiting` bytes (`waiting_bytes`). The host of a CPU shares the device's memory.
    """
    at_rest = ParamMemory(request)
    params = gradients = optimizer = 0
    for node in layout.graph.with_role(Role.PARAM):
        if layout.params[node.target].num_on_host and request.cluster.has_host_memory:
            continue
        storage = layout.params[node.target].storage
        params += prices.rounded(at_rest.local_bytes(node, storage))
        gradients += prices.rounded(at_rest.gradient_bytes(node, storage))
        optimizer += at_rest.state_bytes(node, storage, prices.rounded)
    accumulated = sum(
        prices.rounded(layout.held_bytes(ref, layout.output_state(ref)))
        for node in filter(is_result, layout.graph.nodes)
        for ref in (Ref(node.index),)
    )
    unsharded, saved, transient = timeline.live[timeline.peak] if timeline.live else (0, 0, 0)
    memory = Memory(
        params=params,
        gradients=gradients,
        optimizer=optimizer,
        unsharded=unsharded + waiting[0],
        saved=saved + waiting[1],
        transient=transient,
        accumulated=accumulated,
    )
    return memory, _holders(held_at_peak(timeline, prices.given(), prices), layout)


def _holders(held: tuple[Occupant, ...], layout: Layout) -> tuple[Held, ...]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in held:
        total = sums[*_named(each, layout), each.holder]
        total[0], total[1] = total[0] + 1, total[1] + each.num_bytes
    holders = [
        Held(key, state, holder, count, size)
        for (key, state, holder), (count, size) in sums.items()
        if size
    ]
    return tuple(sorted(holders, key=lambda h: (-h.num_bytes, h.key, h.state, h.holder)))[:MAX_HELD]


def _named(held: Occupant, layout: Layout) -> tuple[str, str]:
    """The class and the sharding of an occupant, as text."""
    match held.what:
        case Value(_, ref, state):
            return layout.graph.nodes[ref.node].key, str(state)
        case Compute(node):
            return layout.graph.nodes[node].key, ""
        case _:
            return IN_FLIGHT, ""


def fullest_points(
    timeline: Timeline, graph: Graph, mesh: Mesh, static_bytes: int
) -> tuple[tuple[PeakCandidate, int], ...]:
    """Per window the peak candidate at which most is held, and its bytes with `static_bytes`, which
    are held all the time; the largest first. Memory between two candidates counts for the next one,
    at the end for the last one."""
    # A microbatch that is repeated holds what the one before it held.
    numbers = timeline.simulated
    ops = [
        (k, event.node)
        for k, event in enumerate(timeline.events[number] for number in numbers)
        if isinstance(event, Compute) and is_peak_candidate(graph, event.node)
    ]
    live = np.array([timeline.live[number] for number in numbers], np.int64).reshape(-1, 3)
    starts = [0, *(k + 1 for k, _ in ops[:-1])]
    held_bytes = np.maximum.reduceat(live.sum(axis=1), starts) if ops else ()
    known = blocks_of(graph, mesh)
    most: dict[WindowPlace | None, tuple[int, int]] = {}
    for (_, node), held in zip(ops, map(int, held_bytes), strict=True):
        place = known.window_of(graph.nodes[node])
        if held > most.get(place, (-1, 0))[0]:
            most[place] = held, node
    fullest = sorted(most.values(), key=lambda each: (-each[0], each[1]))
    return tuple((peak_candidate_of(graph, node), static_bytes + held) for held, node in fullest)


def memory_curve(timeline: Timeline, arrived_ns: IntArray, waiting: tuple[int, int]) -> MemoryCurve:
    """Bytes held in up to `MAX_CURVE_POINTS` equal stretches of the step before the optimizer, with
    the `waiting` bytes (`waiting_bytes`), and during the optimizer's step. The device comes to each
    event at `arrived_ns` (`arrivals`)."""
    events = [k for k, event in enumerate(timeline.events) if not isinstance(event, Update)]
    levels = np.array(timeline.live, np.int64).reshape(-1, 3)[events]
    starts = arrived_ns[events]
    total = timeline.spans[events[-1]].end_ns if events else 0
    peak_candidates = max(1, min(MAX_CURVE_POINTS, total))
    marks = [total * (k + 1) // peak_candidates for k in range(peak_candidates)]
    fullest = np.zeros((peak_candidates, 3), np.int64)
    if events:
        ends = np.append(starts[1:], total)
        first = np.searchsorted(marks, starts, side="right").clip(max=peak_candidates - 1)
        last = np.searchsorted(marks, ends, side="left").clip(max=peak_candidates - 1)
        last = np.maximum(first, last)
        ascending = np.lexsort((levels.sum(axis=1), last, first))
        # Of the events in the same stretches the fullest counts, or the last of those.
        is_fullest = (np.diff(first[ascending], append=-1) != 0) | (
            np.diff(last[ascending], append=-1) != 0
        )
        places = ascending[is_fullest]
        for place in places[np.lexsort((places, levels[places].sum(axis=1)))]:
            fullest[first[place] : last[place] + 1] = levels[place]
    fullest += np.array([*waiting, 0], np.int64)
    unsharded, saved, transient = (tuple(int(n) for n in fullest[:, k]) for k in range(3))
    rest = (0,) if len(events) < len(timeline.events) else ()
    time_ns = (*marks, *([timeline.end_ns] if rest else []))
    return MemoryCurve(time_ns, (*unsharded, *rest), (*saved, *rest), (*transient, *rest))


# The times of forward, backward and their parts, which a pipeline puts in an order of its own.

_LAUNCHES_PER_ACTION = 40
"""The host's time for a stage's action beside its ops, in launches: for receiving its inputs and
sending its outputs. 0.3 ms where an op is called in 7 to 8 us (ADR 33)."""


def arrivals(timeline: Timeline) -> IntArray:
    """Nanoseconds at which the device comes to each event, and to the end. A message is started
    then, and takes its time once its links are free."""
    ends = (
        0 if isinstance(event, Start) else span.end_ns
        for event, span in zip(timeline.events, timeline.spans, strict=True)
    )
    return np.maximum.accumulate(np.fromiter(chain([0], ends), np.int64))


def microbatch_times(scheduled: Schedule, arrived_ns: IntArray, device: Device) -> MicrobatchTimes:
    """The times of a simulated step on `device`: of the last microbatch and of the one before. The
    device comes to each event at `arrived_ns`. The host of a GPU is ahead of it, so that an action
    takes none of the GPU's time."""
    marks = arrived_ns.tolist()
    start = (scheduled.microbatches - 1) * len(scheduled.microbatch_before)
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
    """The first event, and the one behind the last, of forward, of both parts of backward and of
    the update, in a microbatch that begins with event `start`."""
    parts = microbatch.forward, microbatch.backward, microbatch.weights, microbatch.update
    return [*pairwise(accumulate(map(len, parts), initial=start))]


def _lengths(microbatch: Schedule, marks: Sequence[int], start: int) -> list[int]:
    """Nanoseconds of the parts of a microbatch that begins with event `start`."""
    return [marks[b] - marks[a] for a, b in parts_of_microbatch(microbatch, start)]
