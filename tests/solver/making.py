"""Short ways to write a small problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.problem import Edge, Flow, IntArray, Problem, Sink, Usage

Arc = tuple[int, int, int]


def ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def edge(source: int, target: int, cost: Sequence[Sequence[int]]) -> Edge:
    return Edge(source, target, np.array(cost, dtype=np.int64))


def flow(
    source: int,
    made: Sequence[int],
    sinks: Sequence[tuple[int, Sequence[int]]],
    arcs: Sequence[Arc],
    num_states: int,
) -> Flow:
    """`arcs` are (tail, head, cost)."""
    tails, heads, costs = zip(*arcs, strict=True) if arcs else ((), (), ())
    return Flow(
        key=f"flow of {source}",
        source=source,
        source_state=ints(made),
        sinks=tuple(Sink(node, ints(asked)) for node, asked in sinks),
        states=tuple(f"state{s}" for s in range(num_states)),
        tails=ints(tails),
        heads=ints(heads),
        costs=ints(costs),
    )


def problem(
    costs: Sequence[Sequence[int]],
    *,
    usages: Sequence[Sequence[int]] | None = None,
    intervals: Sequence[tuple[int, int]] | None = None,
    edges: Sequence[Edge] = (),
    flows: Sequence[Flow] = (),
    limit: int | None = None,
) -> Problem:
    """Nodes named `node0`, ...; without `usages` nothing is used, without `intervals` all live."""
    count = len(costs)
    return Problem(
        name="made",
        keys=tuple(f"node{i}" for i in range(count)),
        labels=tuple(tuple(f"choice{c}" for c in range(len(each))) for each in costs),
        costs=tuple(ints(each) for each in costs),
        usages=tuple(
            (Usage(*span, ints(amounts)),)
            for span, amounts in zip(
                intervals or [(0, 1)] * count,
                usages or [[0] * len(each) for each in costs],
                strict=True,
            )
        ),
        edges=tuple(edges),
        flows=tuple(flows),
        usage_limit=limit,
    )
