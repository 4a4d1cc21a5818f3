"""Compiles the loops of a search before its time limit begins.

numba compiles a loop at its first call with arguments of some types, which takes seconds, or reads
it from its cache. So each search does one step on a problem of four nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from autopar.ir.problem import Edge, Flow, Problem, Sink, Usage
from autopar.solver.clock import Clock
from autopar.solver.column_generation.passing import Passing, unpriced
from autopar.solver.column_generation.relays import distances_weighed, no_potentials, relay

TINY_NODES, TINY_CHOICES = 4, 2


def tiny_problem() -> Problem:
    """A fully connected problem, of which contraction leaves some nodes, with memory."""
    amounts = np.arange(TINY_CHOICES, dtype=np.int64)
    return Problem(
        name="loops",
        keys=tuple(f"n{i}" for i in range(TINY_NODES)),
        labels=(("a", "b"),) * TINY_NODES,
        costs=(amounts,) * TINY_NODES,
        usages=((Usage(0, 2, amounts),),) * TINY_NODES,
        edges=tuple(
            Edge(i, j, np.eye(TINY_CHOICES, dtype=np.int64))
            for j in range(TINY_NODES)
            for i in range(j)
        ),
        usage_limit=TINY_NODES,
    )


@cache
def ready_column_generation() -> None:
    """Compiles the loops that `column_generation` calls."""
    states = np.arange(TINY_CHOICES, dtype=np.int64)
    flow = Flow(
        key="f",
        source=0,
        source_state=states,
        # With three commodities, each has distances of its own.
        sinks=tuple(Sink(node, states) for node in range(1, TINY_NODES)),
        states=("a", "b"),
        tails=states,
        heads=states[::-1].copy(),
        costs=states + 1,
    )
    stated = replace(tiny_problem(), flows=(flow,))
    distances = distances_weighed(stated.flows, stated.flows)
    relayed = relay(stated, distances, no_potentials(stated))
    assert relayed is not None
    passing = Passing(relayed, unpriced(stated))
    passing.sweep(Clock(0.0), 1)
    passing.at_least()
