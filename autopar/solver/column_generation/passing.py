"""Message passing from the master's prices: a bound for all plans, and one for each choice.

The prices of states that the master does not have are guesses on the safe side, so that their first
bound is far below the master's. Sweeps raise it, up to the relaxation of the whole problem if the
master has the choices that matter.
"""

from __future__ import annotations

import numpy as np

from autopar.ir.problem import FloatArray, Problem
from autopar.solver.clock import Clock
from autopar.solver.column_generation.relays import Relayed
from autopar.solver.ilp import Model
from autopar.solver.memory import maximal_times
from autopar.solver.pairwise import kernels
from autopar.solver.pairwise.bound import Guide, MemoryPrices, certify
from autopar.solver.pairwise.compiling import compiled, compiled_within
from autopar.solver.pairwise.core import Core
from autopar.solver.pairwise.kernels import least_of_nodes, most_choices, rows_least, summed

# The compiled pass that computes a lower bound for every choice.

# Inside compiled functions numpy's scalars are Python's.
# pyright: reportReturnType=none, reportArgumentType=none


@compiled_within
def least_costs(
    core: Core,
    theta: FloatArray,
    message: FloatArray,
    of_nodes: FloatArray,
    of_edges: FloatArray,
    row: FloatArray,
) -> None:
    """Sets the least cost of every node and every edge after `message`; `row` is scratch."""
    own = theta.copy()
    for e in range(len(core.source)):
        a, b = core.source[e], core.target[e]
        rows, columns = core.first[a + 1] - core.first[a], core.first[b + 1] - core.first[b]
        is_target = e < 0  # False; for that as a literal numba would compile it once more
        rows_least(core, e, is_target, message, row)
        of_edges[e] = np.inf
        for c in range(rows):
            of_edges[e] = min(of_edges[e], row[c] - message[core.source_message[e] + c])
            own[core.first[a] + c] += message[core.source_message[e] + c]
        for d in range(columns):
            own[core.first[b] + d] += message[core.target_message[e] + d]
    least_of_nodes(core, own, of_nodes)


@compiled
def weigh(
    core: Core, upward: bool, theta: FloatArray, message: FloatArray, at_least: FloatArray
) -> None:
    """One pass of message passing, as in `kernels.sweep`, that raises `at_least[label]` to the
    bound on plans with that choice. The bound is the sum of the least costs of all other nodes and
    edges, the choice's own cost, and the best row of each of its edges. It is computed at the
    choice's node, before that passes its costs on."""
    num_nodes, widest = len(core.first) - 1, most_choices(core)
    own, with_rows, rows = np.empty(widest), np.empty(widest), np.empty(widest)
    of_nodes, of_edges = np.empty(num_nodes), np.empty(len(core.source))
    least_costs(core, theta, message, of_nodes, of_edges, rows)
    total = summed(of_nodes) + summed(of_edges)
    for step in range(num_nodes):
        i = step if upward else num_nodes - 1 - step
        begin, size = core.first[i], core.first[i + 1] - core.first[i]
        middle = core.near_first[i] + core.near_split[i]
        total -= of_nodes[i]
        num_later, num_earlier = 0, 0
        for c in range(size):
            own[c] = theta[begin + c]
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e, is_target = core.near_edge[at], at < middle
            total -= of_edges[e]
            base = core.target_message[e] if is_target else core.source_message[e]
            if is_target == upward:
                num_earlier += 1
                rows_least(core, e, is_target, message, rows)
                for c in range(size):
                    message[base + c] = rows[c]
                of_edges[e] = 0.0
            else:
                num_later += 1
            for c in range(size):
                own[c] += message[base + c]
        share = 1.0 / max(num_later, num_earlier, 1)
        for c in range(size):
            with_rows[c] = own[c]
        for at in range(core.near_first[i], core.near_first[i + 1]):
            e, is_target = core.near_edge[at], at < middle
            if is_target == upward:
                continue
            base = core.target_message[e] if is_target else core.source_message[e]
            rows_least(core, e, is_target, message, rows)
            of_edges[e] = np.inf
            for c in range(size):
                with_rows[c] += rows[c] - message[base + c]
                message[base + c] -= share * own[c]
                of_edges[e] = min(of_edges[e], rows[c] - message[base + c])
        left = 1.0 - share * num_later
        of_nodes[i] = np.inf
        for c in range(size):
            at_least[begin + c] = max(at_least[begin + c], total + with_rows[c])
            of_nodes[i] = min(of_nodes[i], left * own[c])
        total += of_nodes[i]
        for at in range(core.near_first[i], core.near_first[i + 1]):
            total += of_edges[core.near_edge[at]]


_SWEEPS_PER_LOOK = 10
_LOOK_NS, _LABEL_NS = 1_000, 60_000
"""The work of `_SWEEPS_PER_LOOK` sweeps per message entry, and per label that of what is around
them: relays, and the choices that they exclude."""
PROGRESS = 1e-4
"""Sweeps end when `_SWEEPS_PER_LOOK` of them raise the bound by no more than this part of it."""

_ROUNDING = 1e-9
"""By how much, as a part, sweeps must exceed a bound for exact arithmetic to prove it."""


class Passing:
    """Messages on `relayed`, with a price of a byte at each of `maximal_times` (`multipliers`)."""

    def __init__(self, relayed: Relayed, multipliers: FloatArray) -> None:
        self.core = relayed.core
        self.memory = MemoryPrices(self.core)
        self.multipliers = multipliers
        self._labels = relayed.labels
        self._message = relayed.message
        self._theta = self.core.cost + self.memory.prices(multipliers)
        self._plan = np.zeros(self.core.num_nodes, dtype=np.int64)

    def sweep(
        self,
        clock: Clock,
        most_sweeps: int,
        *,
        progress: float = PROGRESS,
        known: float = float("-inf"),
        enough: float = float("inf"),
    ) -> int:
        """Sweeps, and returns the bound that exact arithmetic proves. It ends when ten sweeps raise
        the bound by no more than `progress`, a part of it, when the bound is `enough`, or after
        `most_sweeps`. It also ends when these would not raise the bound above `known`."""
        core = self.core
        order, free = np.arange(core.num_nodes), np.ones(core.num_nodes, dtype=np.bool_)
        margin = np.zeros(core.num_nodes)
        bound = last = float("-inf")
        clock.count(len(core.cost) * _LABEL_NS)
        for done in range(0, most_sweeps, _SWEEPS_PER_LOOK):
            for _ in range(_SWEEPS_PER_LOOK):
                for upward in (True, False):
                    bound = kernels.sweep(
                        core, upward, order, free, self._theta, self._message, self._plan, margin
                    )
            clock.count(len(self._message) * _LOOK_NS)
            looks_left = (most_sweeps - done) // _SWEEPS_PER_LOOK - 1
            is_vain = bound + looks_left * (bound - last) < known
            is_enough = bound > enough + _ROUNDING * abs(enough)
            has_settled = bound - last <= progress * abs(bound)
            if has_settled or is_enough or is_vain or clock.expired:
                break
            last = bound
        return certify(core, self.memory, Guide(self.multipliers, self._message, bound, 1.0))

    def read(self) -> tuple[int, ...]:
        """Per node of the problem, its choice in the plan of the last sweep: the best one given the
        nodes decided before it and the messages of the others."""
        taken = np.zeros(len(self.core.cost), dtype=np.bool_)
        taken[self.core.first[:-1] + self._plan] = True
        return tuple(int(np.argmax((own >= 0) & taken[own])) for own in self._labels)

    def at_least(self) -> tuple[FloatArray, ...]:
        """Per node of the problem and choice, a lower bound on plans with that choice."""
        core = self.core
        bounds = np.full(len(core.cost), -np.inf)
        for upward in (True, False, True):
            weigh(core, upward, self._theta, self._message, bounds)
        bounds += core.fixed_cost + float(self.multipliers @ (core.base - core.limit))
        return tuple(np.where(own < 0, np.inf, bounds[own]) for own in self._labels)


def memory_prices(problem: Problem, model: Model, row_duals: FloatArray) -> FloatArray:
    """The price of a byte at each of the problem's `maximal_times`, by the duals of `model`."""
    times = maximal_times(problem)
    prices = np.zeros(len(times))
    for limit in model.limits:
        place = int(np.searchsorted(times, limit.time))
        prices[place] += max(0.0, -float(row_duals[limit.row])) * limit.scale
    return prices


def unpriced(problem: Problem) -> FloatArray:
    """Prices of zero for memory."""
    return np.zeros(len(maximal_times(problem)))
