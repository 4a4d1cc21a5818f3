"""A predicted step in the trace format of Chrome and Perfetto.

A stage is a process, named by its ranks. Its threads are the block at work, the critical path, what
the device computes (ops, and the optimizer), and the links of each mesh axis. One more is for waits
of the device for its host. Counters have the memory by holder. Times are microseconds with three
decimals, so nanoseconds are exact. The format is that of "Trace Event Format" (Google, 2016),
phases X, C and M.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from autopar.errors import PlanError
from autopar.plans.plan import StagePlan
from autopar.report.names import clean, short_op
from autopar.report.placed import route_text, sharding_text
from autopar.report.timeline import Bar, DrawnStep, Part, Stretch, Track, timeline

MAX_BARS = 2_000_000
"""No viewer opens more."""

BLOCKS, CRITICAL, COMPUTE, FIRST_AXIS = range(1, 5)
"""Threads: blocks, the critical path, compute and optimizer, and then the axes. Viewers take the
thread that has the number of its process for the main one."""

STAGE = 0

TraceEvent = dict[str, Any]


def chrome_trace(plan: StagePlan) -> bytes:
    """The trace of a plan, as JSON, a line per event. PlanError if it is too long for viewers."""
    step = timeline(plan)
    entries = len(step.bars) + len(step.path)
    if entries > MAX_BARS:
        raise PlanError(
            f"its step takes {entries} entries, and viewers open no trace of more than "
            f"{MAX_BARS}; the page (-o) shows repeated blocks once"
        )
    lines = b",\n".join(msgspec.json.encode(event) for event in events(plan, step))
    return b'{"displayTimeUnit":"ms","traceEvents":[\n' + lines + b"\n]}\n"


def events(plan: StagePlan, step: DrawnStep) -> Iterator[TraceEvent]:
    """The events: names of the threads first, then each thread's in order of time."""
    threads = _threads(step)
    yield from _names(plan, threads)
    for stretch in step.stretches:
        # Viewers nest events at one time, such as messages that only start.
        if stretch.start_ns < stretch.end_ns:
            yield from (_block(step, stretch, k) for k in range(stretch.run.times))
    described: dict[Part, TraceEvent] = {}
    for bar in step.bars:
        if bar.part not in described:
            described[bar.part] = _described(plan, bar.part)
        yield _bar(bar, threads[bar.part.track], described[bar.part])
    for bar in step.path:
        yield _bar(bar, CRITICAL, {"track": clean(bar.part.track.name), "key": clean(bar.part.key)})
    yield from _memory(plan)


def _threads(step: DrawnStep) -> dict[Track, int]:
    others = [track for kind in ("network", "host") for track in step.tracks if track.kind == kind]
    threads = {track: COMPUTE for track in step.tracks if track not in others}
    return threads | {track: FIRST_AXIS + k for k, track in enumerate(others)}


def _names(plan: StagePlan, threads: dict[Track, int]) -> Iterator[TraceEvent]:
    last = max(plan.structure.num_devices - 1, 0)
    model = clean(plan.whole.structure.model) or "step"
    yield _meta("process_name", 0, {"name": f"{model}, each of ranks 0 to {last}"})
    titles = {BLOCKS: "blocks", CRITICAL: "critical path", COMPUTE: "compute"}
    titles |= {tid: clean(track.name) for track, tid in threads.items() if tid != COMPUTE}
    for tid, title in titles.items():
        yield _meta("thread_name", tid, {"name": title})
        yield _meta("thread_sort_index", tid, {"sort_index": tid})


def _meta(name: str, tid: int, args: TraceEvent) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": STAGE, "tid": tid, "args": args}


def _block(step: DrawnStep, stretch: Stretch, repetition: int) -> TraceEvent:
    start_ns, end_ns = step.extent(stretch, repetition)
    name = clean(step.title(stretch))
    number = f" {repetition + 1} of {stretch.run.times}" if stretch.run.times > 1 else ""
    return _event(f"{name}{number}", "block", BLOCKS, start_ns, end_ns - start_ns, {})


def _bar(bar: Bar, tid: int, described: TraceEvent) -> TraceEvent:
    part, args = bar.part, described
    if part.is_sent:
        args = described | {"bytes": bar.num_bytes, "exposed (ns)": bar.exposed_ns}
    name = part.what if part.is_sent else short_op(part.what)
    category = part.phase or part.track.kind
    return _event(clean(name), clean(category), tid, bar.start_ns, bar.duration_ns, args)


def _described(plan: StagePlan, part: Part) -> TraceEvent:
    """What a viewer shows of a bar besides its time."""
    mesh = plan.structure.mesh
    args: TraceEvent = {"key": clean(part.key), "module": clean(part.module)}
    if part.is_sent:
        args["sharding"] = clean(route_text(plan.structure.routes.get(part.key, ()), mesh))
        args["collectives"] = -(-part.count // part.occurrences)
    elif part.key in plan.estimates.ops:
        op = plan.estimates.ops[part.key]
        args["op"] = clean(op.op)
        args["reads"] = [clean(f"{key} {sharding_text(state, mesh)}") for key, state in op.inputs]
        args["makes"] = [
            clean(f"{kind} {sharding_text(state, mesh)}") for kind, state in op.outputs
        ]
    return args


def _memory(plan: StagePlan) -> Iterator[TraceEvent]:
    """Entry k of the curve holds from the end of the one before it to its own time."""
    curve, whole = plan.estimates.memory_curve, msgspec.structs.asdict(plan.estimates.memory)
    start_ns = 0
    if not whole["accumulated"]:
        del whole["accumulated"]
    held = zip(curve.time_ns, curve.unsharded, curve.saved, curve.transient)
    for end_ns, unsharded, saved, transient in held:
        yield {
            "ph": "C",
            "name": "memory (bytes)",
            "pid": STAGE,
            "ts": _us(start_ns),
            "args": {**whole, "unsharded": unsharded, "saved": saved, "transient": transient},
        }
        start_ns = end_ns


def _event(
    name: str, category: str, tid: int, start_ns: int, ns: int, args: TraceEvent
) -> TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": STAGE,
        "tid": tid,
        "ts": _us(start_ns),
        "dur": _us(ns),
        "args": args,
    }


def _us(ns: int) -> float:
    return ns / 1000
