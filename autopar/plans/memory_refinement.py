"""Memory refinement: problems are solved until a plan is within the memory limit.

A problem has a row for the end of forward, and one for each peak candidate at which an earlier plan
was fullest. It has a row for the host once a plan has more there than a device's share. Rows do not
count all that a plan holds, such as messages in flight; that is known once there is a plan. If it
breaks the limit, it is set aside in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, SolverError
from autopar.ir.mesh import Mesh
from autopar.ir.peak_candidates import ON_HOST, PeakCandidate
from autopar.ir.problem import Basis, Conflict, Problem, Solution, Status
from autopar.ir.units import format_bytes, format_ns
from autopar.plans.decisions import describe_conflict
from autopar.plans.estimates import MicrobatchMemory, StageEstimates
from autopar.plans.requests.request import PlanRequest
from autopar.plans.structure import Stage

MAX_ROUNDS = 12
"""How many plans are made for a limit, each with more rows, or more set aside, than the one
before."""

_MOST_ROUGH = 3
"""How many of them may be rough: a rough plan shows as well which rows are missing."""

_MAX_PEAK_CANDIDATES = 8
"""How many peak candidates of one plan become rows."""


@dataclass(frozen=True, slots=True)
class CostBreakdown:
    """The cost of a plan, and its memory in each pass of a microbatch. `fullest` has the peak
    candidate of each window with its bytes, the fullest first."""

    estimates: StageEstimates
    microbatch_memory: MicrobatchMemory
    fullest: tuple[tuple[PeakCandidate, int], ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan on one mesh, and the problem that it solves: the one stated, with rows for peak
    candidates and what is set aside in them."""

    request: PlanRequest
    problem: Problem
    structure: Stage
    estimates: StageEstimates
    microbatch_memory: MicrobatchMemory
    solution: Solution
    is_tight: bool = False
    """Whether memory binds: without a limit another plan may be better, by more than the
    tolerance. It does not if a solve without a limit finds none that is better by more than
    `provenance.PROVEN`."""
    peak_candidates: Mapping[PeakCandidate, int] = field(default_factory=dict[PeakCandidate, int])
    """Those that are rows of the problem, with the bytes set aside at each."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.request.mesh


class Beaten(Exception):
    """The candidate `name` has no plan as good as the incumbent, or none is known. `bound` is a
    lower bound on all of its plans. It `is_tight` if a plan without a memory limit might be as
    good."""

    def __init__(self, name: str, bound: int, *, is_tight: bool = False) -> None:
        super().__init__(f"{name}: nothing better; at least {format_ns(bound)}")
        self.bound, self.is_tight = bound, is_tight


class MemoryBinds(Exception):
    """The best plan of a candidate whatever its memory, at the end of the search `free`, does not
    fit."""

    def __init__(self, free: MemoryRefinement) -> None:
        super().__init__("memory binds, and another number of microbatches is likelier")
        self.free = free


@dataclass(slots=True)
class MemoryRefinement:
    """The state of the search for a plan of the problem `stated` that fits.

    `rows` are the peak candidates that the problem counts, with the bytes set aside at each;
    `restate` adds them to a problem. Plans that fit take at least `bound` nanoseconds. `estimates`
    and `basis` are those of the last plan.
    """

    request: PlanRequest
    stated: Problem
    restate: Callable[[Problem, Mapping[PeakCandidate, int]], Problem]
    say: Callable[[str], None]
    rows: Mapping[PeakCandidate, int] = field(default_factory=dict[PeakCandidate, int])
    bound: int = 0
    basis: Basis | None = None
    estimates: StageEstimates | None = None
    is_smallest: bool = False
    """Whether no more is set aside than some plan leaves free."""
    num_rough: int = 0
    """Rough plans so far that do not fit."""
    is_thorough: bool = False
    """Whether rough plans will not do any more: one fits, or several did not."""
    is_guess: bool = False
    """Whether what is set aside is that of another plan, which may have far more in flight."""
    guess: Mapping[PeakCandidate, int] = field(default_factory=dict[PeakCandidate, int])
    """What is set aside for a plan on the same mesh: about as much is in flight in another one."""
    is_borrowed: bool = False
    """Whether that is set aside. It rules no plan out."""

    def problem(self) -> Problem:
        """The problem with all rows."""
        return self.restate(self.stated, self.rows)

    def rules_out(self, solution: Solution, cutoff: int | None) -> bool:
        """Whether no plan leaves free what is set aside; from then on, less is set aside.
        InfeasibleError if no plan fits, SolverError if that is not known, Beaten if no plan, or
        within the limit none that is known, takes less than `cutoff` nanoseconds."""
        name, is_limited = self.request.name, self.stated.usage_limit is not None
        is_known = is_limited and not solution.is_rough
        is_over = is_known and cutoff is not None and solution.objective >= cutoff
        # More rows only make plans within the limit longer.
        is_beaten = solution.status is Status.BEATEN or is_over
        if is_beaten and self.is_borrowed and any(self.rows.values()):
            self.rows, self.is_borrowed = dict.fromkeys(self.rows, 0), False
            return True
        if is_beaten:
            is_tight = is_limited and solution.is_limiting
            # With less set aside there may be better plans.
            bound = self.bound if any(self.rows.values()) else solution.bound
            raise Beaten(name, bound, is_tight=is_tight)
        if solution.status is Status.LIMIT:
            raise SolverError(f"{name}: no plan was found in time; raise the time limit")
        if solution.status is not Status.INFEASIBLE:
            return False
        conflict = solution.conflict
        if conflict is None or not any(self.rows.values()):
            reason = str(solution.statistics.get("reason", ""))
            raise infeasible(name, conflict, reason, self.problem())
        self.is_thorough = True
        if self.is_guess:
            self.rows, self.is_guess = dict.fromkeys(self.rows, 0), False
            return True
        if self.is_smallest:
            raise self.failure()
        # Another plan may hold less of what rows do not count.
        missing, self.is_smallest = conflict.needed - conflict.limit, True
        self.rows = {point: max(0, aside - missing) for point, aside in self.rows.items()}
        return True

    def takes_guess(self, solution: Solution) -> bool:
        """Whether the `guess` is set aside from here on: after a rough solution, which is not worth
        a plan then."""
        if not (any(self.guess.values()) and solution.is_rough):
            return False
        self.bound = max(self.bound, solution.bound)
        self.rows, self.guess = {**self.rows, **self.guess}, {}
        self.is_guess = self.is_borrowed = True
        return True

    def holds(self, solution: Solution, resolved: Solution, costs: CostBreakdown) -> bool:
        """Whether the plan of a `solution` of the problem fits; `resolved` is the same without
        optional copies. If it does not, the peak candidates that break the limit become rows.
        SolverError if the plan does not cost what the solver says."""
        mesh, estimates = self.request.mesh, costs.estimates
        if estimates.modelled_ns != resolved.objective:
            raise SolverError(
                f"mesh {mesh}: the plan costs {estimates.modelled_ns} ns by its own cost breakdown "
                f"and {resolved.objective} ns by the solver's; this is a defect of autopar"
            )
        if not any(self.rows.values()):
            self.bound = max(self.bound, solution.bound)
        self.estimates = estimates
        over = dict[PeakCandidate, int]()
        if estimates.memory.total > self._limit():
            over |= costs.fullest[:_MAX_PEAK_CANDIDATES]
        if estimates.host_bytes > self._limit(ON_HOST):
            over[ON_HOST] = estimates.host_bytes
        if self.stated.usage_limit is not None:
            self.num_rough += bool(over)
            self.is_thorough = not over or self.num_rough >= _MOST_ROUGH
        if not over:
            return True
        self._learn(solution, over)
        self.is_guess = solution.is_rough
        return False

    def _limit(self, point: PeakCandidate | None = None) -> int:
        request = self.request
        return request.host_memory_bytes if point == ON_HOST else request.memory_limit_bytes

    def _learn(self, solution: Solution, fullest: Mapping[PeakCandidate, int]) -> None:
        """Makes the `fullest` peak candidates of a plan rows, and sets aside what the plan holds
        there beyond what rows count. Nothing is set aside before the problem has a peak
        candidate."""
        rows = {point: self.rows.get(point, 0) for point in (*self.rows, *fullest)}
        mesh, has_peak_candidates = self.request.mesh, bool({*self.rows} - {ON_HOST})
        if ON_HOST in fullest:
            self.say(f"{mesh}: the host's memory is too small; solving again within it")
        counting = {
            point
            for point in fullest
            if point in self.rows or (has_peak_candidates and point != ON_HOST)
        }
        if counting - {ON_HOST}:
            self.say(f"{mesh}: memory exceeds the limit at a peak; solving again")
        if counting:
            counted = _counted(self.stated, self.restate(self.stated, rows), solution.choice)
            for (point, aside), known in zip([*rows.items()], counted, strict=True):
                held = fullest.get(point, 0)
                if point in counting and held > self._limit(point):
                    rows[point] = max(held - (known - aside), aside + 1)
        self.rows = rows

    def failure(self) -> InfeasibleError:
        """Why no plan fits."""
        assert self.estimates is not None
        memory, limit = self.estimates.memory, self._limit()
        if memory.total <= limit:
            on_host, share = self.estimates.host_bytes, self._limit(ON_HOST)
            return InfeasibleError(
                f"{self.request.name}: the smallest-memory plan found has "
                f"{format_bytes(on_host)} per device in its host's memory, "
                f"{format_bytes(on_host - share)} over its share of {format_bytes(share)}. "
                "Raise --memory-host, use more devices, or more --microbatches"
            )
        return InfeasibleError(
            f"{self.request.name}: the smallest-memory plan found peaks at "
            f"{format_bytes(memory.total)} per device, {format_bytes(memory.total - limit)} over "
            f"the memory limit of {format_bytes(limit)}; {format_bytes(memory.transient)} of it is "
            "temporary. Raise --memory-limit, use more devices, or lower the batch"
        )


def _counted(stated: Problem, problem: Problem, choice: Sequence[int]) -> list[int]:
    """Bytes in each row that `problem` has and `stated` has not, in order."""
    first = _end(stated)
    sizes = [0] * (_end(problem) - first)
    for usages, c in zip(problem.usages, choice, strict=True):
        for usage in usages:
            if usage.start >= first:
                sizes[usage.start - first] += int(usage.amounts[c])
    return sizes


def _end(problem: Problem) -> int:
    return max(usage.stop for usages in problem.usages for usage in usages)


def bounded(solution: Solution, bound: int) -> Solution:
    """`solution` with a bound on more plans than those of its problem: those of the problem as
    stated, before memory was set aside, or those on other meshes."""
    bound = min(bound, solution.objective)
    status = Status.OPTIMAL if bound == solution.objective else Status.FEASIBLE
    return replace(solution, status=status, bound=bound)


def infeasible(
    name: str, conflict: Conflict | None, reason: str = "", problem: Problem | None = None
) -> InfeasibleError:
    """The error if the candidate `name` has no plan; its `problem` shows whose memory binds. If
    that is the reason, the error says how much is missing and what holds most."""
    on_host = problem is not None and conflict is not None and conflict.time in problem.other_limits
    message = describe_conflict(conflict, on_host=on_host) if conflict else reason
    return InfeasibleError(f"{name}: {message or 'no combination of choices is allowed'}")


def over_limit_at(name: str, where: str, num_bytes: int, limit: int) -> InfeasibleError:
    """The error if any plan of the candidate `name` has `num_bytes` or more in memory at some
    point, `where` in words, which is more than the `limit`."""
    return InfeasibleError(
        f"{name}: the smallest-memory plan needs {format_bytes(num_bytes)} per device or "
        f"more {where}, and the memory limit is {format_bytes(limit)}: "
        f"{format_bytes(num_bytes - limit)} is missing. Raise --memory-limit, use more devices, or "
        "lower the batch"
    )
