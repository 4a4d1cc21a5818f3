"""Message passing: a bound and plans for problems without flows that are too big for the program.

The problem is contracted and laid out in arrays. Then, in rounds of fixed length, one thread raises
the bound (`ascent`). Another makes and improves plans (`plans`) under the prices and messages of
the round before. Once the bound has converged, both make plans. The clock can only end the rounds,
so that without a limit the answer depends on the problem alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np

from autopar.errors import SolverError
from autopar.ir.problem import Problem, Solution, Status, Usage
from autopar.solver.clock import Clock
from autopar.solver.evaluate import evaluate
from autopar.solver.infeasible import infeasible_solution
from autopar.solver.loops import TINY_NODES, tiny_problem
from autopar.solver.memory import maximal_times, peak_conflict, total_usages, usage_sums
from autopar.solver.message_passing.ascent import Ascent, Shortage, find_shortage
from autopar.solver.message_passing.plans import Dive, Improver, LiftedPlan, Planner
from autopar.solver.pairwise.bound import Guide, MemoryPrices, certify
from autopar.solver.pairwise.contract import contract
from autopar.solver.pairwise.core import Core, lay_out
from autopar.solver.search import Progress

# Usages that cannot exceed the limit.
#
# A time at which even the largest choices together keep the limit constrains no plan. A usage that
# is live at such times only can be dropped. Nodes without memory can be eliminated (`contract`),
# and need no prices.


def without_slack(problem: Problem) -> Problem:
    """`problem` with only those usages that are live at a time when some plan could exceed the
    limit.

    Exact: the same plans keep the limit, and cost the same.
    """
    if problem.usage_limit is None:
        return problem
    times = maximal_times(problem)
    limits = map(problem.limit_at, times.tolist())
    most = usage_sums(problem, times, lambda amounts: int(amounts.max()))
    is_tight = [used > limit for used, limit in zip(most, limits, strict=True)]
    tight = times[np.array(is_tight, np.bool_)]

    def matters(usage: Usage) -> bool:
        start, stop = np.searchsorted(tight, (usage.start, usage.stop)).tolist()
        return start < stop

    kept = tuple(tuple(filter(matters, usages)) for usages in problem.usages)
    return replace(problem, usages=kept)


LARGE = "message passing"
_FIRST_STEPS, _STEPS = 40, 100
"""Steps of the prices before the first round, and in each, which take about as long as a round."""
_ROUNDS = 40
"""The number of rounds without a time limit."""
_DOUBTS = (2, 8)
"""After so many rounds without a plan, a proof of infeasibility is tried."""


def search_large(problem: Problem, clock: Clock, progress: Progress) -> Solution:
    """Works on `problem` (without flows) for as long as the clock allows."""
    stated, problem = problem, without_slack(problem)
    contracted = contract(problem, clock=clock)
    if clock.expired:
        return Solution(Status.LIMIT, solver=LARGE)
    if not contracted.possible:
        reason = "no combination of choices is allowed, whatever memory it takes"
        return infeasible_solution({}, None, reason)
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
        return _impossible(problem, Shortage((worst,), (int(core.base[worst]),)), statistics)
    if not core.num_nodes:
        return _evaluated(stated, contracted.lift({}), core.fixed_cost, statistics)
    work = _Work(core, clock, progress)
    work.run()
    statistics |= {"rounds": work.rounds}
    if work.shortage is not None:
        return _impossible(problem, work.shortage, statistics)
    if work.best is None:
        return Solution(Status.LIMIT, bound=work.bound, solver=LARGE, statistics=statistics)
    taken = work.best.choice.tolist()
    choice = contracted.lift(dict(zip(contracted.nodes, taken, strict=True)))
    return _evaluated(stated, choice, work.bound, statistics)


def _evaluated(
    problem: Problem, choice: tuple[int, ...], bound: int, statistics: dict[str, int | float | str]
) -> Solution:
    """The solution `choice`, with a proven `bound`."""
    final = evaluate(problem, choice)
    if not final.feasible:
        raise SolverError(f"problem {problem.name}: the plan is not allowed: {final.violation}")
    bound = min(bound, final.objective)
    status = Status.OPTIMAL if bound == final.objective else Status.FEASIBLE
    return Solution(status, choice, final.arcs, final.objective, bound, LARGE, statistics)


def _impossible(
    problem: Problem, shortage: Shortage, statistics: dict[str, int | float | str]
) -> Solution:
    """The infeasible solution, with the times at which the limit cannot be kept."""
    assert problem.usage_limit is not None
    times = maximal_times(problem)[list(shortage.times)].tolist()
    worst = max(range(len(times)), key=lambda i: shortage.needed[i])
    needed, limit = shortage.needed[worst], problem.usage_limit
    smallest_memory = [int(sizes.argmin()) for sizes in total_usages(problem)]
    conflict = peak_conflict(problem, smallest_memory, times[worst], needed)
    if needed > limit:
        reason = f"at least {needed} is needed at time {times[worst]}, the limit is {limit}"
    else:
        named = ", ".join(map(str, times))
        reason = f"the limit of {limit} cannot be kept at all of the times {named}"
    return infeasible_solution(statistics, conflict, reason)


class _Work:
    def __init__(self, core: Core, clock: Clock, progress: Progress) -> None:
        self.core = core
        self.clock = clock
        self.progress = progress
        self.memory = MemoryPrices(core)
        self.ascent = Ascent(core, self.memory)
        self.best: LiftedPlan | None = None
        self.bound = certify(core, self.memory, self.ascent.best)
        self.rounds = 0
        self.shortage: Shortage | None = None
        self._improvers = [Improver(core, self.memory, clock, seed) for seed in range(2)]
        self._guide: Guide = self.ascent.best

    def run(self) -> None:
        """All rounds, or as many as there is time for."""
        self._raise_bound(_FIRST_STEPS)
        self._take_guide()
        with ThreadPoolExecutor(1) as pool:
            while not self._finished():
                self.rounds += 1
                first, second = self._improvers
                beside = (
                    pool.submit(second.improve, self._guide, self.best)
                    if self.ascent.has_converged
                    else pool.submit(self._raise_bound, _STEPS)
                )
                first.improve(self._guide, self.best)
                is_limited = self.clock.limit_s is not None
                while is_limited and not beside.done() and not self.clock.expired:
                    first.improve_more(self._guide)
                beside.result()
                self._take_plans()
                self._take_guide()
                if self.best is None and self.rounds in _DOUBTS:
                    self.shortage = find_shortage(self.core, self.memory, self.clock)

    def _finished(self) -> bool:
        is_proven = self.best is not None and self._cost(self.best) <= self.bound
        has_tried = self.clock.limit_s is None and self.rounds >= _ROUNDS
        return self.shortage is not None or is_proven or has_tried or self.clock.expired

    def _cost(self, plan: LiftedPlan) -> int:
        return plan.cost + self.core.fixed_cost

    def _raise_bound(self, steps: int) -> None:
        for _ in range(steps):
            if self.ascent.has_converged or self.clock.expired:
                return
            self.ascent.advance()

    def _take_plans(self) -> None:
        plans = [each.best for each in self._improvers if each.best is not None]
        self.best = min(plans, key=lambda plan: plan.cost, default=None)

    def _take_guide(self) -> None:
        guide = self.ascent.best
        if guide is not self._guide:
            self._guide = guide
            self.bound = max(self.bound, certify(self.core, self.memory, guide))
        cost = f"{self._cost(self.best)}" if self.best is not None else "none"
        self.progress(f"round {self.rounds}: plan {cost}, bound {self.bound}")


@cache
def ready_message_passing() -> None:
    """Compiles the loops that `message_passing` calls."""
    stated = tiny_problem()
    core = lay_out(stated, contract(stated, Clock(0.0)))
    memory = MemoryPrices(core)
    ascent = Ascent(core, memory)
    ascent.advance()
    guide = ascent.best
    certify(core, memory, guide)
    planner = Planner(core, memory)
    start, free = np.zeros(TINY_NODES, dtype=np.int64), np.ones(TINY_NODES, dtype=np.bool_)
    *_, plan = planner.dive(start, free, guide, guide.multipliers, Dive())
    planner.walk(
        plan, memory.prices(guide.multipliers), np.ones(1), np.arange(TINY_NODES), 1, TINY_NODES
    )
