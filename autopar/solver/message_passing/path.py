"""Message passing: a bound and plans for problems without flows that are too big for the program.

The problem is contracted and laid out in arrays. Then, in rounds of fixed length, one thread raises
the bound (`ascent`) while another makes plans under the prices and messages of the round before:
dives over everything until a plan keeps the limit, from then on dives over parts of it (a stretch
of the program's order, or what is near a node), and moves of trees. The clock can only end the
rounds, so without a limit the answer depends on the problem alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from autopar.ir.problem import FORBIDDEN, BoolArray, Conflict, FloatArray, IntArray, Problem
from autopar.solver.memory import maximal_times, peak_conflict, total_usages
from autopar.solver.message_passing.ascent import Ascent, Guide, certify
from autopar.solver.message_passing.core import Core, lay_out
from autopar.solver.message_passing.infeasible import Shortage, find_shortage
from autopar.solver.message_passing.memory import MemoryPrices
from autopar.solver.message_passing.plans import Dive, FoundPlan, Planner
from autopar.solver.reductions.contract import contract
from autopar.solver.search import Clock, Progress

_FIRST_STEPS = 200
_STEPS = 100
_TRIALS = 100
_ROUNDS = 20
_IDLE_ROUNDS = 60
"""Rounds in which neither plan nor bound gets better, after which nothing more is expected."""
_THREADED_ENTRIES = 200_000
"""Entries in tables below which two threads would only take turns at the interpreter."""
_DOUBTS = (2, 8)
"""Rounds without a plan after which a proof is looked for that there is none."""
_CYCLE, _FRESH_AT = 5, 2
"""Of every cycle of rounds, the first change the best plan, those from the second on a new one."""
_FRESH_FACTORS = (0.98, 1.0, 1.02, 1.05, 1.1, 1.2)
_FIRST_DIVES = 12
_DEARER = 0.002
_PARTS = (0.01, 0.03, 0.1, 0.3)
_LEAST_PART = 20
_NOISE = (0.5, 1.5)
_FACTORS = (0.7, 0.9, 1.0, 1.1)
_DIVES = (
    Dive(0.1, 2, 0.0003),
    Dive(0.3, 1, 0.0003),
    Dive(0.1, 2, 0.003),
    Dive(0.3, 1, 0.0),
)
_WALKED_FACTORS = np.array([0.0, 0.5, 1.0, 1.0, 2.0])
_MOVES = 1000
_TREE = 40


@dataclass(slots=True)
class LargeAnswer:
    """A choice per node of the problem (empty if no plan was found) and a proven lower bound.
    `possible` is false when no plan is allowed; then `conflict` and `reason` say why."""

    choice: tuple[int, ...]
    bound: int
    statistics: dict[str, int | float | str]
    possible: bool = True
    conflict: Conflict | None = None
    reason: str = ""


def search_large(problem: Problem, clock: Clock, progress: Progress) -> LargeAnswer:
    """Works on `problem` (without flows) for as long as the clock allows."""
    contracted = contract(problem, clock=clock)
    if clock.expired:
        return LargeAnswer((), 0, {})
    if not contracted.possible:
        reason = "no combination of choices is allowed, whatever memory it takes"
        return LargeAnswer((), 0, {}, possible=False, reason=reason)
    core = lay_out(problem, contracted)
    statistics: dict[str, int | float | str] = {
        "core_nodes": core.num_nodes,
        "core_edges": len(core.source),
        "core_choices": len(core.cost),
        "times": core.num_times,
    }
    progress(f"contracted from {len(problem.keys)} nodes to {core.num_nodes}")
    if core.num_times and int(core.base.max()) > core.limit:
        worst = int(core.base.argmax())
        shortage = Shortage((worst,), (int(core.base[worst]),))
        return _impossible(problem, shortage, statistics)
    if not core.num_nodes:
        return LargeAnswer(contracted.lift({}), core.fixed_cost, statistics)
    work = _Work(core, clock, progress)
    work.run()
    statistics |= {"rounds": work.rounds}
    if work.shortage is not None:
        return _impossible(problem, work.shortage, statistics)
    choice: tuple[int, ...] = ()
    if work.best is not None:
        taken = work.best.choice.tolist()
        choice = contracted.lift(dict(zip(contracted.nodes, taken, strict=True)))
    return LargeAnswer(choice, work.bound, statistics)


def _impossible(
    problem: Problem, shortage: Shortage, statistics: dict[str, int | float | str]
) -> LargeAnswer:
    """The answer that says at which times the limit cannot be kept."""
    assert problem.usage_limit is not None
    times = maximal_times(problem)[list(shortage.times)].tolist()
    worst = max(range(len(times)), key=lambda i: shortage.needed[i])
    needed, limit = shortage.needed[worst], problem.usage_limit
    leanest = [int(sizes.argmin()) for sizes in total_usages(problem)]
    conflict = peak_conflict(problem, leanest, times[worst], needed)
    if needed > limit:
        reason = f"at least {needed} is needed at time {times[worst]}, the limit is {limit}"
    else:
        named = ", ".join(map(str, times))
        reason = f"the limit of {limit} cannot be kept at all of the times {named}"
    return LargeAnswer((), 0, statistics, possible=False, conflict=conflict, reason=reason)


class _Work:
    def __init__(self, core: Core, clock: Clock, progress: Progress) -> None:
        self.core = core
        self.clock = clock
        self.progress = progress
        self.memory = MemoryPrices(core)
        self.ascent = Ascent(core, self.memory)
        self.planner = Planner(core, self.memory)
        self.best: FoundPlan | None = None
        self._current: FoundPlan | None = None
        self.bound = core.fixed_cost
        self.rounds = 0
        self._last_gain = 0
        self.shortage: Shortage | None = None
        self._guide: Guide = self.ascent.best
        self._dearer: FloatArray = np.zeros(core.num_times)

    def run(self) -> None:
        """All rounds, or as many as there is time for."""
        self._raise_bound(_FIRST_STEPS)
        self._take_guide()
        with ThreadPoolExecutor(1) as pool:
            while not self._finished():
                self.rounds += 1
                if len(self.core.pool) < _THREADED_ENTRIES:
                    self._raise_bound(_STEPS)
                    self._make_plans()
                else:
                    raising = pool.submit(self._raise_bound, _STEPS)
                    self._make_plans()
                    raising.result()
                self._take_guide()
                if self.best is None and self.rounds in _DOUBTS:
                    self.shortage = find_shortage(self.core, self.memory, self.clock)

    def _finished(self) -> bool:
        if self.shortage is not None:
            return True
        if self.clock.limit_s is None and self.rounds >= _ROUNDS:
            return True
        if self.rounds - self._last_gain > _IDLE_ROUNDS:
            return True
        proven = self.best is not None and self._cost(self.best) <= self.bound
        return proven or self.clock.expired

    def _cost(self, plan: FoundPlan) -> int:
        return plan.cost + self.core.fixed_cost

    def _raise_bound(self, steps: int) -> None:
        for _ in range(steps):
            if self.ascent.settled or self.clock.expired:
                return
            self.ascent.advance()

    def _take_guide(self) -> None:
        guide = self.ascent.best
        if guide is not self._guide:
            self._guide = guide
            bound = certify(self.core, self.memory, guide)
            if bound > self.bound:
                self.bound = bound
                self._last_gain = self.rounds
        cost = f"{self._cost(self.best)}" if self.best is not None else "none"
        self.progress(f"round {self.rounds}: plan {cost}, bound {self.bound}")

    def _make_plans(self) -> None:
        if self.best is None:
            self._find_plan()
            self._current = self.best
        elif self.rounds % _CYCLE == _FRESH_AT:
            self._current = self._fresh_plan() or self.best
        elif self.rounds % _CYCLE == 0:
            self._current = self.best
        if self._current is None:
            return
        for _ in range(_TRIALS):
            if self.clock.expired:
                return
            self._change_part(self._current)
        prices = self.memory.prices(self._guide.multipliers)
        walked = self.planner.walk(self._current, prices, _WALKED_FACTORS, _MOVES, _TREE)
        self._offer(walked)
        self._offer(self.planner.walk(walked, np.zeros_like(prices), np.zeros(1), _MOVES, _TREE))

    def _fresh_plan(self) -> FoundPlan | None:
        """The cheapest of some plans that owe nothing to the best one, made under the prices of
        now, which rise a little from one to the next."""
        core = self.core
        everything = np.ones(core.num_nodes, dtype=np.bool_)
        start = np.zeros(core.num_nodes, dtype=np.int64)
        found: list[FoundPlan] = []
        for dearer in _FRESH_FACTORS:
            if self.clock.expired:
                break
            multipliers = self._guide.multipliers * dearer
            found += self.planner.dive(start, everything, self._guide, multipliers, _DIVES[0])
        good = [plan for plan in found if plan.fits and plan.cost < FORBIDDEN]
        for plan in good:
            self._offer(plan)
        return min(good, key=lambda plan: plan.cost, default=None)

    def _offer(self, plan: FoundPlan) -> None:
        if not plan.fits or plan.cost >= FORBIDDEN:
            return
        if self._current is None or plan.cost < self._current.cost:
            self._current = plan
        if self.best is None or plan.cost < self.best.cost:
            self.best = plan
            self._last_gain = self.rounds

    def _find_plan(self) -> None:
        """Dives over everything, at prices that rise where the last plan took too much."""
        core = self.core
        everything = np.ones(core.num_nodes, dtype=np.bool_)
        start = np.zeros(core.num_nodes, dtype=np.int64)
        for _ in range(_FIRST_DIVES):
            multipliers = self._guide.multipliers + self._dearer
            plans = self.planner.dive(start, everything, self._guide, multipliers, _DIVES[0])
            for plan in plans:
                self._offer(plan)
            last = plans[-1]
            if not last.fits or last.cost >= FORBIDDEN:
                prices = self.memory.prices(multipliers)
                self._offer(self.planner.walk(last, prices, _WALKED_FACTORS * 4, _MOVES, _TREE))
            if self.best is not None or self.clock.expired:
                return
            over = np.maximum(last.excess, 0.0)
            square = float(over @ over)
            if square > 0:
                worth = _DEARER * self._guide.unit * float(over.max()) / square
                self._dearer = 1.1 * self._dearer + worth / max(1, core.limit) * over

    def _change_part(self, plan: FoundPlan) -> None:
        draw = self.planner.random
        size = max(_LEAST_PART, int(self.core.num_nodes * draw.choice(_PARTS)))
        factor = draw.choice(_FACTORS)
        if draw.random() < 0.5:
            factor = factor * draw.uniform(*_NOISE, self.core.num_times)
        how = _DIVES[int(draw.integers(len(_DIVES)))]
        part = self._some_nodes(min(size, self.core.num_nodes))
        multipliers = self._guide.multipliers * factor
        for found in self.planner.dive(plan.choice, part, self._guide, multipliers, how):
            self._offer(found)

    def _some_nodes(self, size: int) -> BoolArray:
        """A stretch of `size` nodes in order, or as many around one."""
        core, draw = self.core, self.planner.random
        picked = np.zeros(core.num_nodes, dtype=np.bool_)
        if draw.random() < 0.5:
            begin = int(draw.integers(core.num_nodes - size + 1))
            picked[begin : begin + size] = True
            return picked
        found = [int(draw.integers(core.num_nodes))]
        picked[found[0]] = True
        for node in found:
            for other in self._neighbours(node):
                if len(found) < size and not picked[other]:
                    picked[other] = True
                    found.append(other)
            if len(found) >= size:
                break
        return picked

    def _neighbours(self, node: int) -> list[int]:
        """Up to 20 of the neighbours of `node`, in random order."""
        core = self.core
        edges = core.near_edge[core.near_first[node] : core.near_first[node + 1]]
        others: IntArray = core.source[edges] + core.target[edges] - node
        self.planner.random.shuffle(others)
        return others[:20].tolist()
