"""The compiled loops of a search, made ready before its time begins.

numba compiles a loop at its first call with arguments of some types, which takes seconds, or reads
it from its cache. Each search here is taken one step of on a problem of four nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from autopar.ir.problem import Edge, Flow, Problem, Sink, Usage
from autopar.solver.clock import Clock
from autopar.solver.column_generation.passing import Passing, unpriced
from autopar.solver.column_generation.potentials import no_potentials
from autopar.solver.column_generation.relays import relay
from autopar.solver.column_generation.ways_weighed import distances_weighed
from autopar.solver.message_passing.ascent import Ascent
from autopar.solver.message_passing.plans import Dive, Planner
from autopar.solver.pairwise.bound import certify
from autopar.solver.pairwise.core import lay_out
from autopar.solver.pairwise.memory import MemoryPrices
from autopar.solver.reductions.contract import contract

_NODES, _CHOICES = 4, 2


def _problem() -> Problem:
    """Nodes that are all joined, so that contraction leaves some, with memory and one flow."""
    amounts = np.arange(_CHOICES, dtype=np.int64)
    return Problem(
        name="loops",
        keys=tuple(f"n{i}" for i in range(_NODES)),
        labels=(("a", "b"),) * _NODES,
        costs=(amounts,) * _NODES,
        usages=((Usage(0, 2, amounts),),) * _NODES,
        edges=tuple(
            Edge(i, j, np.eye(_CHOICES, dtype=np.int64)) for j in range(_NODES) for i in range(j)
        ),
        usage_limit=_NODES,
    )


@cache
def ready_message_passing() -> None:
    """What `message_passing` calls is compiled."""
    stated = _problem()
    core = lay_out(stated, contract(stated, Clock(0.0)))
    memory = MemoryPrices(core)
    ascent = Ascent(core, memory)
    ascent.advance()
    guide = ascent.best
    certify(core, memory, guide)
    planner = Planner(core, memory)
    start, free = np.zeros(_NODES, dtype=np.int64), np.ones(_NODES, dtype=np.bool_)
    *_, plan = planner.dive(start, free, guide, guide.multipliers, Dive())
    planner.walk(plan, memory.prices(guide.multipliers), np.ones(1), np.arange(_NODES), 1, _NODES)


@cache
def ready_column_generation() -> None:
    """What `column_generation` calls is compiled."""
    states = np.arange(_CHOICES, dtype=np.int64)
    flow = Flow(
        key="f",
        source=0,
        source_state=states,
        sinks=(Sink(1, states),),
        states=("a", "b"),
        tails=states,
        heads=states[::-1].copy(),
        costs=states + 1,
    )
    stated = replace(_problem(), flows=(flow,))
    distances = distances_weighed(stated.flows, stated.flows)
    relayed = relay(stated, distances, no_potentials(stated))
    assert relayed is not None
    passing = Passing(relayed, unpriced(stated))
    passing.settle(Clock(0.0), 1)
    passing.at_least()
