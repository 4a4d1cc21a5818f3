"""Small random problems for hypothesis, with everything in them that a problem can have."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from autopar.ir.problem import (
    FORBIDDEN,
    Edge,
    Flow,
    IntArray,
    Problem,
    Saving,
    Sink,
    Usage,
    Window,
)

MAX_NODES = 5
MAX_CHOICES = 3
MAX_STATES = 4
MAX_ARCS = 6


def _ints(draw: st.DrawFn, count: int, low: int, high: int) -> IntArray:
    values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    return np.array(values, dtype=np.int64)


def _costs(draw: st.DrawFn, count: int, unit: int) -> IntArray:
    """Costs with many ties; about one in eight is forbidden."""
    costs = _ints(draw, count, 0, 8)
    return np.where(costs == 8, FORBIDDEN, costs * unit)


def _flow(draw: st.DrawFn, index: int, counts: list[int], unit: int) -> Flow:
    nodes = st.integers(0, len(counts) - 1)
    size = draw(st.integers(1, MAX_STATES))
    source = draw(nodes)
    lowest = draw(st.sampled_from([0, 0, -1]))
    sinks = [
        Sink(node, _ints(draw, counts[node], lowest, size - 1))
        for node in draw(st.lists(nodes, max_size=4))
    ]
    if sinks and draw(st.booleans()):
        sinks.append(sinks[0])
    num_arcs = draw(st.integers(0, MAX_ARCS))
    return Flow(
        key=f"flow{index}",
        source=source,
        source_state=_ints(draw, counts[source], lowest, size - 1),
        sinks=tuple(sinks),
        states=tuple(f"state{s}" for s in range(size)),
        tails=_ints(draw, num_arcs, 0, size - 1),
        heads=_ints(draw, num_arcs, 0, size - 1),
        costs=_costs(draw, num_arcs, unit),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    counts = draw(st.lists(st.integers(1, MAX_CHOICES), min_size=1, max_size=MAX_NODES))
    nodes = st.integers(0, len(counts) - 1)
    unit = draw(st.sampled_from([1, 7, 10**7 + 19]))
    grain = draw(st.sampled_from([1, 10**9 + 7]))
    edges = [
        Edge(a, b, _costs(draw, counts[a] * counts[b], unit).reshape(counts[a], counts[b]))
        for a, b in draw(st.lists(st.tuples(nodes, nodes), max_size=4))
    ]
    flows = [_flow(draw, f, counts, unit) for f in range(draw(st.integers(0, 2)))]
    limit = draw(st.none() | st.integers(0, 15))
    return Problem(
        name="random",
        keys=tuple(f"node{i}" for i in range(len(counts))),
        labels=tuple(tuple(f"choice{c}" for c in range(n)) for n in counts),
        costs=tuple(_costs(draw, n, unit) for n in counts),
        usages=tuple(_usages(draw, n, grain) for n in counts),
        edges=tuple(edges),
        flows=tuple(flows),
        usage_limit=None if limit is None else limit * grain,
    )


def _usages(draw: st.DrawFn, num_choices: int, grain: int) -> tuple[Usage, ...]:
    """None to three, one after the other, some of no length."""
    times = st.integers(0, 4)
    marks = sorted(draw(st.lists(times, min_size=2, max_size=4)))
    usages = [
        Usage(start, stop, _ints(draw, num_choices, 0, 5) * grain)
        for start, stop in pairwise(marks)
    ]
    return tuple(usage for usage in usages if draw(st.integers(0, 3)))


@st.composite
def windowed_problems(draw: st.DrawFn) -> Problem:
    """What anything saves is a part of what it costs."""
    problem = draw(problems())

    def saved(costs: IntArray) -> IntArray:
        tenths = _ints(draw, len(costs), 0, 10)
        return np.where(costs >= FORBIDDEN, 0, costs) * tenths // 10

    def saving(resource: str) -> Saving:
        nodes = draw(st.sets(st.integers(0, len(problem.costs) - 1)))
        flows = draw(st.sets(st.integers(0, len(problem.flows) - 1))) if problem.flows else set()
        return Saving(
            resource,
            {i: saved(problem.costs[i]) for i in sorted(nodes)},
            {f: saved(problem.flows[f].costs) for f in sorted(flows)},
        )

    resources = ("device", "x", "y")[: draw(st.integers(2, 3))]
    # Halves, since what is in two windows must not save more than it costs.
    windows = [
        Window(f"window{w}", tuple(_halved(saving(name)) for name in resources))
        for w in range(draw(st.integers(1, 2)))
    ]
    return replace(problem, windows=tuple(windows))


def _halved(saving: Saving) -> Saving:
    return Saving(
        saving.resource,
        {i: saved // 2 for i, saved in saving.nodes.items()},
        {f: saved // 2 for f, saved in saving.flows.items()},
    )


@st.composite
def chained_problems(draw: st.DrawFn) -> Problem:
    """Problems without flows in which choices follow from others', and some take no memory."""
    problem = replace(draw(problems()), flows=())
    count = min(MAX_NODES, len(problem.keys))
    counts = [len(costs) for costs in problem.costs[:count]]
    edges = [e for e in problem.edges if max(e.source, e.target) < count]
    for a in range(count - 1):
        column = _ints(draw, counts[a], 0, counts[a + 1] - 1)
        allowed = np.arange(counts[a + 1])[None, :] == column[:, None]
        if draw(st.booleans()):
            edges.append(Edge(a, a + 1, np.where(allowed, 1, FORBIDDEN)))
    silent = [draw(st.booleans()) for _ in range(count)]
    usages = [() if s else found for s, found in zip(silent, problem.usages, strict=False)]
    return replace(
        problem,
        keys=problem.keys[:count],
        labels=problem.labels[:count],
        costs=problem.costs[:count],
        usages=tuple(usages),
        edges=tuple(edges),
    )
