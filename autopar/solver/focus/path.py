"""The focused path: flows and more choices than one integer program takes, as on three axes.

A *master*, the problem with some of its choices, is solved exactly: a plan, and prices (duals) of
what every tensor costs in every state. Message passing extends the prices to all choices, which
gives a lower bound for the whole problem, and one per choice for the plans that have it. Choices
whose bound exceeds the best plan are out for good; the most promising of the others enter the next
master. When few choices are left, the problem with these is solved exactly, and what comes of it is
optimal. Else rounds go on until the plan is within `TOLERANCE` of the bound.

This is column generation (Gilmore and Gomory, 1961) with message passing (Kolmogorov, "Convergent
Tree-Reweighted Message Passing for Energy Minimization", 2006) to price whole chains of columns,
which one after the other would not pay, and to stop with a bound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.problem import IntArray, Problem
from autopar.solver import exact
from autopar.solver.distances import all_distances
from autopar.solver.evaluate import Evaluator
from autopar.solver.focus.passing import Passing, memory_prices, unpriced
from autopar.solver.focus.potentials import no_potentials, potentials
from autopar.solver.focus.relays import relay
from autopar.solver.reductions.keep import keep_choices
from autopar.solver.search import Clock, Progress, Search
from autopar.solver.ways import shortest_ways

TOLERANCE = 0.01
"""The gap with which a plan is good enough, as a part of its cost, if it cannot be closed soon."""

_ROUNDS = 12
_FIRST_CHOICES = 2_000
_MORE_CHOICES = 1_000
_FEW_CHOICES = 6_000
_ROUNDING = 1e-9
"""How far a bound in floating point may be off, as a part of it: sums of a few thousand terms."""

BoolArray = npt.NDArray[np.bool_]


def search_focused(problem: Problem, clock: Clock, progress: Progress) -> Search:
    """Solves `problem` as far as `TOLERANCE`, rounds and clock allow."""
    work = _Work(problem, clock, progress)
    work.begin()
    for number in range(_ROUNDS):
        if work.finished():
            break
        work.round(number)
    return work.state


class _Work:
    def __init__(self, problem: Problem, clock: Clock, progress: Progress) -> None:
        self.problem = problem
        self.state = Search(problem, Evaluator(problem), clock, progress)
        self.distances = all_distances(problem.flows)
        self.open: list[BoolArray] = [np.ones(len(c), dtype=np.bool_) for c in problem.costs]
        self.kept: list[IntArray] = []
        self._at_least: list[npt.NDArray[np.float64]] = [
            np.full(len(c), -np.inf) for c in problem.costs
        ]
        self._done = False

    def begin(self) -> None:
        """Chooses the first master: what is leanest, and what message passing alone deems good."""
        relayed = relay(self.problem, self.distances, no_potentials(self.problem))
        if relayed is None:
            self.state.infeasible = self._done = True
            return
        self._learn(Passing(relayed, unpriced(self.problem)))
        self.kept = [np.array([int(u.argmin())]) for u in self.problem.usages]
        self._grow(_FIRST_CHOICES)

    def round(self, number: int) -> None:
        """One master, and what its prices say of the whole."""
        state = self.state
        master = keep_choices(self.problem, self.kept)
        found = exact.search(master, state.clock, state.progress, shortest_ways)
        state.statistics |= found.statistics | {"rounds": number + 1}
        if found.choice:
            chosen = tuple(int(some[c]) for some, c in zip(self.kept, found.choice, strict=True))
            state.offer(chosen, state.evaluator(chosen))
        if found.relaxation is None or found.infeasible:
            grown = self._grow(sum(map(len, self.kept)))
            state.infeasible = found.infeasible and not grown
            self._done = not grown
            return
        model, row_duals = found.relaxation
        prices = potentials(self.problem, self.kept, model, row_duals, self.distances)
        relayed = relay(self.problem, self.distances, prices)
        assert relayed is not None, "what is possible by itself does not depend on prices"
        self._learn(Passing(relayed, memory_prices(self.problem, model, row_duals)))
        state.progress(f"round {number + 1}: gap {self._gap():.4%}, {self._num_open()} choices")
        if not state.proven and not state.clock.expired:
            self._close_or_grow()

    def finished(self) -> bool:
        """Whether nothing more is to be done."""
        return self._done or self.state.proven or self.state.clock.expired

    def _learn(self, passing: Passing) -> None:
        state = self.state
        state.raise_bound(passing.settle(state.clock))
        for i, bounds in enumerate(passing.at_least()):
            self._at_least[i] = np.maximum(self._at_least[i], bounds)
        if state.evaluation is not None:
            most = state.evaluation.objective * (1 + _ROUNDING)
            self.open = [
                there & (bounds <= most)
                for there, bounds in zip(self.open, self._at_least, strict=True)
            ]

    def _gap(self) -> float:
        best = self.state.evaluation
        return self.state.gap / best.objective if best and best.objective else float("inf")

    def _num_open(self) -> int:
        return sum(int(there.sum()) for there in self.open)

    def _close_or_grow(self) -> None:
        if self.state.evaluation is not None and self._num_open() <= _FEW_CHOICES:
            self._close()
        elif self._gap() <= TOLERANCE:
            self._done = True
        elif not self._grow(_MORE_CHOICES):
            self._close()

    def _close(self) -> None:
        """Solves the problem with what is left of it: no other choice is in a better plan."""
        state = self.state
        left = [np.flatnonzero(there) for there in self.open]
        assert state.evaluation is not None
        if all(map(len, left)):
            found = exact.search(keep_choices(self.problem, left), state.clock, state.progress)
            state.statistics |= found.statistics
            if found.choice:
                chosen = tuple(int(some[c]) for some, c in zip(left, found.choice, strict=True))
                state.prefer(chosen, state.evaluator(chosen))
            state.raise_bound(min(found.bound, float(state.evaluation.objective)))
        else:
            state.raise_bound(float(state.evaluation.objective))
        self._done = True

    def _grow(self, count: int) -> bool:
        """Adds the `count` open choices of the lowest bounds to the master, if any are left."""
        fresh: list[tuple[float, int, int]] = []
        for i, (there, kept) in enumerate(zip(self.open, self.kept, strict=True)):
            new = np.setdiff1d(np.flatnonzero(there), kept)
            fresh += [(float(self._at_least[i][c]), i, int(c)) for c in new]
        more: list[list[int]] = [[] for _ in self.kept]
        for _, i, c in sorted(fresh)[:count]:
            more[i].append(c)
        self.kept = [
            np.union1d(kept, np.array(new, dtype=np.int64))
            for kept, new in zip(self.kept, more, strict=True)
        ]
        return bool(fresh)
