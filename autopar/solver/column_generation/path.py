"""Column generation: flows and more choices than one integer program takes, as on three axes.

A *master*, the problem with some of its choices, is solved exactly. That gives a plan, and prices
(duals) of every tensor in every state. Message passing extends the prices to all choices, which
gives a lower bound for the whole problem, and one per choice for the plans that have it. Choices
whose bound exceeds the best plan are left out for good. Those next to the best plan, and the others
of the lowest bounds, enter the next master. When few choices are left, the problem with these is
solved exactly, and the solution is optimal. Else rounds go on until the gap is as small as the
caller requires, or within `TOLERANCE` where rounds take long.

With very many nodes, as of a model of a thousand different layers, even a master of two choices per
node is a large program. There the first plan is the one that message passing reads off, which is
enough if it is within `TOLERANCE`. If it is not, one master raises the bound. More of them take
minutes and help little: the plan states its gap.

This is column generation (Gilmore and Gomory, 1961) with message passing (Kolmogorov, "Convergent
Tree-Reweighted Message Passing for Energy Minimization", 2006). Message passing prices whole chains
of columns, which would not pay one by one, and gives a bound to stop at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.grouping import grouped
from autopar.ir.problem import BoolArray, FloatArray, Flow, IntArray, Problem
from autopar.solver import exact
from autopar.solver.clock import Clock
from autopar.solver.column_generation.passing import PROGRESS, Passing, memory_prices, unpriced
from autopar.solver.column_generation.relays import (
    distances_weighed,
    no_potentials,
    potentials,
    relay,
)
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from autopar.solver.memory import total_usages
from autopar.solver.pairwise.tables import keep_choices
from autopar.solver.paths import shortest_paths
from autopar.solver.routing import all_distances
from autopar.solver.search import Progress, Search
from autopar.solver.windows import first_shares, weighed

TOLERANCE = 0.01
"""The gap with which a plan is good enough, as a part of its cost, where rounds take long."""

_MANY_NODES = 1_000
"""The number of nodes above which a master has no more than two choices per node."""

_ROUNDS, _PROGRESS = 12, 0.01
_PATIENCE, _COARSE_PATIENCE = 2, 1
"""The most rounds, and the part of the gap that a round should close. After `_PATIENCE` rounds that
do not, or `_COARSE_PATIENCE` where more than `TOLERANCE` is allowed, the search ends: the choices
that they add are not those that hold the bound down."""

_FIRST_CHOICES = 1_000
_MORE_CHOICES = 1_000
_FEW_CHOICES, _FEW_WHEN_COARSE = 4_000, 2_500
"""The number of choices up to which the rest of a problem is solved as a whole; fewer where more
than `TOLERANCE` is allowed, as rounds then prove enough."""
_VERY_FEW, _NEAR = 1_000, 0.02
"""The number of choices up to which the rest is solved as a whole at any gap. With more choices it
is at gaps up to `_NEAR`: above, another master takes less time and leaves out most choices."""

_FAR = 0.1
"""A gap above this after the second round shows that the bound of messages stays far below the
relaxation, as on slow links (Llama-8B on 64x8 L4s: 14 % below the best plan, the relaxation 0.2 %).
On two axes the rest of the problem is then solved as a whole: its relaxation takes as long as two
more masters. On three axes that would take minutes: rounds go on while they find better plans."""

_SOON = 8_000
"""Up to so many choices another round takes a few seconds: rounds go on within `TOLERANCE`."""

_SWEEPS = 240
_FIRST_PROGRESS = 1e-3
"""The progress below which sweeps end while no prices are known."""

_ROUNDING = 1e-9
"""How far a bound in floating point may be off, as a part of it: sums of a few thousand terms."""


def generate_columns(
    problem: Problem,
    clock: Clock,
    progress: Progress,
    cutoff: float = float("inf"),
    tolerance: float = 0.0,
    *,
    rough: bool = False,
) -> Search:
    """Solves `problem` as far as `TOLERANCE`, rounds and clock allow. It ends earlier once no plan
    can cost less than `cutoff`, or the gap is at most `tolerance`. A `rough` search with windows
    ends with a round that finds no better plan, if many choices are left."""
    work = _Work(problem, clock, progress, cutoff, tolerance, rough=rough)
    work.begin()
    for number in range(_ROUNDS):
        if work.finished():
            break
        work.round(number)
    return work.state


def quick_bound(problem: Problem, clock: Clock, enough: float = float("inf")) -> float:
    """The lower bound of message passing alone, which ends once it is `enough`: within a percent on
    two axes, if memory is ample."""
    passing = _without_prices(problem)
    return float("-inf") if passing is None else passing.sweep(clock, _SWEEPS, enough=enough)


def _without_prices(problem: Problem) -> Passing | None:
    """Message passing from prices of zero; None if there is no plan."""
    if problem.windows:
        summed = weighed(problem, first_shares(problem))
        distances = distances_weighed(problem.flows, summed.flows)
    else:
        summed, distances = problem, all_distances(problem.flows)
    relayed = relay(summed, distances, no_potentials(summed))
    return None if relayed is None else Passing(relayed, unpriced(summed))


class _Work:
    """The state of column generation. `problem` is the rest of the first problem: `left[i]` are the
    choices of node `i` that may be in a plan as good as the best one, as indices in the first
    problem. `kept[i]` are the choices of the master, as indices in `left[i]`."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        progress: Progress,
        cutoff: float,
        tolerance: float,
        *,
        rough: bool = False,
    ) -> None:
        self.problem, self._rough = problem, rough and bool(problem.windows)
        self._breaks_ties = not tolerance
        if problem.windows:
            tolerance = max(tolerance, exact.WINDOWED_TOLERANCE)
        self.state = Search(
            problem, Evaluator(problem), clock, progress, cutoff=cutoff, tolerance=tolerance
        )
        good_enough = max(tolerance, TOLERANCE) / 4
        self._master = exact.Aim(
            paths=shortest_paths, tolerance=good_enough, dives=True, hopeless=cutoff
        )
        self.distances = all_distances(problem.flows)
        self.left: list[IntArray] = [np.arange(len(c)) for c in problem.costs]
        self.kept: list[IntArray] = [np.array([int(u.argmin())]) for u in total_usages(problem)]
        self._at_least: list[FloatArray] = [np.full(len(c), -np.inf) for c in problem.costs]
        self._done = False
        self._descent: Descent | None = None
        self._has_many = len(problem.keys) > _MANY_NODES
        self._is_small = sum(map(len, problem.costs)) <= exact.MAX_CHOICES
        self._room = 2 * len(problem.keys) if self._has_many else 0
        self._is_coarse = tolerance > TOLERANCE
        self._stalled = 0
        self._is_vain = False

    def begin(self) -> None:
        """Chooses the first master: choices of the smallest memory, and of the lowest bounds."""
        passing = _without_prices(self.problem)
        if passing is None:
            self.state.infeasible = self._done = True
            return
        if self._has_many:
            self._submit_first()
        self._learn(passing, _FIRST_PROGRESS)
        self._done = self._has_many and self._gap() <= TOLERANCE
        self.state.unlimited_bound = self.state.bound
        if not self.finished():
            self._grow(max(_FIRST_CHOICES, self._room))

    def round(self, number: int) -> None:
        """Solves one master, and bounds the whole problem by its prices."""
        state, before = self.state, self._gap()
        cost = state.cost
        master = keep_choices(self.problem, self.kept)
        search = exact.find_exactly(master, state.clock, state.progress, self._master)
        state.statistics |= search.statistics | {"rounds": number + 1}
        state.basis = search.basis or state.basis
        if search.choice:
            chosen = self._chosen(self.kept, search.choice)
            state.submit(chosen, state.evaluator(chosen))
            self._leave_out(self.kept)
        is_better = state.cost < (1 - TOLERANCE) * cost
        has_plan = state.evaluation is not None
        self._is_vain = has_plan and (not is_better or search.bound >= state.cutoff)
        if search.relaxation is None or search.infeasible:
            grown = self._grow(sum(map(len, self.kept)))
            state.infeasible = search.infeasible and not grown
            self._done = not grown
            return
        state.byte_ns = search.byte_ns
        if self._rough and has_plan and not is_better:
            state.is_rough = self._done = sum(map(len, self.left)) > _FEW_CHOICES
            if self._done:
                return
        model, row_duals = search.relaxation
        summed, distances = self.problem, self.distances
        if summed.windows:
            summed = weighed(summed, model.shares(row_duals))
            distances = distances_weighed(self.problem.flows, summed.flows)
        prices = potentials(summed, self.kept, model, row_duals, distances)
        relayed = relay(summed, distances, prices)
        assert relayed is not None, "what is possible by itself does not depend on prices"
        self._learn(Passing(relayed, memory_prices(self.problem, model, row_duals)))
        num_left = sum(map(len, self.left))
        has_progress = self._gap() <= (1 - _PROGRESS) * before
        self._stalled = 0 if has_progress else self._stalled + 1
        state.progress(f"round {number + 1}: gap {self._gap():.4%}, {num_left} choices left")
        if state.proven and self._breaks_ties and num_left <= _FEW_CHOICES:
            self._close()
        elif not self.finished():
            self._close_or_grow(number, num_left)

    def finished(self) -> bool:
        """Whether the search is over."""
        return self._done or self.state.is_finished or self.state.clock.expired

    def _chosen(self, kept: Sequence[IntArray], choice: tuple[int, ...]) -> tuple[int, ...]:
        """Choices of the first problem, from `choice`, indices in `kept`."""
        return tuple(
            int(left[some[c]]) for left, some, c in zip(self.left, kept, choice, strict=True)
        )

    def _learn(self, passing: Passing, progress: float = PROGRESS) -> None:
        """Raises the bounds by `passing`, and leaves out the choices that they exclude."""
        state = self.state
        more = {"known": state.bound, "enough": state.cutoff}
        state.raise_bound(passing.sweep(state.clock, _SWEEPS, progress=progress, **more))
        if state.beaten:
            return
        if self._has_many:
            self._read_off(passing)
        for i, bounds in enumerate(passing.at_least()):
            self._at_least[i] = np.maximum(self._at_least[i], bounds)
        self._leave_out([np.empty(0, dtype=np.int64)] * len(self.kept))

    def _leave_out(self, spared: Sequence[IntArray]) -> None:
        """Leaves out the choices that are in no plan as good as the best one. The `spared` choices
        stay: those of a master whose prices are still to be read."""
        state, best = self.state, self.state.evaluation
        if best is None:
            return
        most = best.objective * (1 + _ROUNDING)
        still = [
            np.union1d(np.flatnonzero(bounds <= most), some)
            for bounds, some in zip(self._at_least, spared, strict=True)
        ]
        if not all(map(len, still)):
            state.raise_bound(float(best.objective))
            return
        self.problem = keep_choices(self.problem, still)
        kept = [
            np.flatnonzero(np.isin(some, kept)) for some, kept in zip(still, self.kept, strict=True)
        ]
        self.left = [left[some] for left, some in zip(self.left, still, strict=True)]
        # A node whose kept choices are all out keeps that of the best plan.
        self.kept = [
            some if len(some) else np.flatnonzero(left == c)
            for some, left, c in zip(kept, self.left, state.choice, strict=True)
        ]
        self._at_least = [b[some] for b, some in zip(self._at_least, still, strict=True)]

    def _submit_first(self) -> None:
        """Submits the first choice of every node. Where links are slow, this plan, which computes
        everything on every device, is near the best, and hard to find node by node."""
        first = (0,) * len(self.problem.keys)
        self.state.submit(first, self.state.evaluator(first))
        self._descend(first)

    def _read_off(self, passing: Passing) -> None:
        """Submits the plan that `passing` read off and, if its gap is too large, the result of
        coordinate descent from it."""
        state = self.state
        read = self._chosen([np.arange(len(some)) for some in self.left], passing.read())
        state.submit(read, state.evaluator(read))
        if self._gap() > TOLERANCE:
            self._descend(read)

    def _descend(self, start: tuple[int, ...]) -> None:
        """Submits the result of coordinate descent from a plan."""
        state = self.state
        if self._descent is None:
            self._descent = Descent(state.problem, state.evaluator, state.clock)
        plan = self._descent.improve(start)
        if plan is not None:
            state.submit(*plan)

    def _gap(self) -> float:
        state = self.state
        return state.gap / state.cost if state.evaluation and state.cost else float("inf")

    def _close_or_grow(self, number: int, num_left: int) -> None:
        few = max(_FEW_WHEN_COARSE if self._is_coarse else _FEW_CHOICES, self._room)
        more = max(_MORE_CHOICES, self._room)
        is_far = number > 0 and self._gap() > _FAR
        if (is_far and self._is_small) or num_left <= (few if self._gap() <= _NEAR else _VERY_FEW):
            self._close()
        elif self._is_enough(num_left) or (is_far and self._is_vain and num_left > few):
            self._done = True
        elif self._add_neighbours() < more and not self._grow(more):
            self._close()

    def _is_enough(self, num_left: int) -> bool:
        if self._has_many and self.state.evaluation is not None:
            return True
        if self._gap() <= TOLERANCE:
            return bool(self._stalled) or num_left > _SOON
        return self._stalled >= (_COARSE_PATIENCE if self._is_coarse else _PATIENCE)

    def _add_neighbours(self) -> int:
        """Adds the choices next to the best plan to the master; returns their number."""
        best = self._best()
        if not best:
            return 0
        before = sum(map(len, self.kept))
        self.kept = [
            np.union1d(kept, some)
            for kept, some in zip(self.kept, near(self.problem, best), strict=True)
        ]
        return sum(map(len, self.kept)) - before

    def _best(self) -> tuple[int, ...]:
        """The best plan, as choices of the rest of the problem; empty without a plan."""
        choice = self.state.choice
        return tuple(
            int(np.searchsorted(left, c)) for left, c in zip(self.left, choice, strict=bool(choice))
        )

    def _close(self) -> None:
        """Solves the rest of the problem: no better plan has any other choice."""
        state = self.state
        tolerance = 0.0 if self._breaks_ties else state.tolerance
        aim = exact.Aim(cutoff=state.cutoff, tolerance=tolerance, known=self._best())
        search = exact.find_exactly(self.problem, state.clock, state.progress, aim)
        state.statistics |= search.statistics
        state.basis = search.basis or state.basis
        if search.choice:
            chosen = self._chosen([np.arange(len(some)) for some in self.left], search.choice)
            state.prefer(chosen, state.evaluator(chosen))
        state.raise_bound(min(search.bound, state.cost))
        state.infeasible = state.evaluation is None and search.infeasible
        self._done = True

    def _grow(self, count: int) -> bool:
        """Adds the `count` choices of the lowest bounds to the master, if any are left."""
        fresh = [
            (float(bounds[c]), i, int(c))
            for i, (bounds, kept) in enumerate(zip(self._at_least, self.kept, strict=True))
            for c in np.setdiff1d(np.flatnonzero(bounds < np.inf), kept)
        ]
        more = grouped((i, c) for _, i, c in sorted(fresh)[:count])
        self.kept = [
            np.union1d(kept, np.array(more.get(i, ()), dtype=np.int64))
            for i, kept in enumerate(self.kept)
        ]
        return bool(fresh)


def near(problem: Problem, choice: Sequence[int]) -> list[IntArray]:
    """Per node, the choices under which every tensor it makes or reads is in a state next to the
    one under `choice`. A node without flows has its own choice alone."""
    neighbours: list[BoolArray | None] = [None] * len(problem.costs)
    for flow in problem.flows:
        adjacent = _adjacent(flow)
        ends = [(flow.source, flow.source_state), *((s.node, s.state) for s in flow.sinks)]
        for node, state in ends:
            there = adjacent[state[choice[node]], state]
            before = neighbours[node]
            neighbours[node] = there if before is None else before & there
    return [
        np.array([c]) if there is None else np.flatnonzero(there)
        for c, there in zip(choice, neighbours, strict=True)
    ]


def _adjacent(flow: Flow) -> BoolArray:
    """Which states are next to each other: they differ in at most one placement or, without
    placements, are joined by an arc in either direction. The last index stands for no state, which
    is next to all."""
    size = len(flow.states)
    joined = np.ones((size + 1, size + 1), dtype=np.bool_)
    if flow.placements is None:
        joined[:size, :size] = np.eye(size, dtype=np.bool_)
        joined[flow.tails, flow.heads] = joined[flow.heads, flow.tails] = True
    else:
        differs = flow.placements[:, None, :] != flow.placements[None, :, :]
        joined[:size, :size] = differs.sum(axis=2) <= 1
    return joined
