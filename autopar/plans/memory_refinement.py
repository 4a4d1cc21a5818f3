"""A plan within the memory limit. A problem counts what is held when the forward phase ends, and
at the moments that plans before have shown to be the fullest, and on the host once a plan has shown
to have more there than a device's share. What is not counted there, such as messages under way, is
known once a plan is: where that breaks the limit, it is set aside."""

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

MAX_ROUNDS = 10
"""How many plans are made within a limit, each with more that counts than the one before."""

_MAX_PEAK_CANDIDATES = 8
"""How many moments of one plan come to count."""


@dataclass(frozen=True, slots=True)
class CostBreakdown:
    """What a plan costs, and holds in each part of a microbatch. `fullest` has, per window, the
    moment at which most is held and how many bytes that is, most first."""

    estimates: StageEstimates
    microbatch_memory: MicrobatchMemory
    fullest: tuple[tuple[PeakCandidate, int], ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan found on one mesh, and the problem that it solves: the one stated, with the
    moments that count and what is set aside."""

    request: PlanRequest
    problem: Problem
    structure: Stage
    estimates: StageEstimates
    microbatch_memory: MicrobatchMemory
    solution: Solution
    is_tight: bool = False
    """Whether memory decides: without a limit another plan may be better, by more than is
    tolerated."""
    peak_candidates: tuple[PeakCandidate, ...] = ()
    """Those that count."""

    @property
    def mesh(self) -> Mesh:
        """Where the plan lies."""
        return self.request.mesh


class Beaten(Exception):
    """A candidate of such a `name` has no plan as good as the one in hand, or none was found;
    `bound` is below all of its plans. It `is_tight` if there might be without a memory limit."""

    def __init__(self, name: str, bound: int, *, is_tight: bool = False) -> None:
        super().__init__(f"{name}: nothing better; at least {format_ns(bound)}")
        self.bound, self.is_tight = bound, is_tight


@dataclass(slots=True)
class MemoryRefinement:
    """What is known on the way to a plan that fits, of those of the problem as it was `stated`.

    `restate` makes it one that counts what is held at moments, so many bytes set aside at each:
    `rows`. Plans that fit take `bound` nanoseconds or more; `estimates` and `basis` are the last.
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
    """Whether no more is set aside than some plan leaves."""
    is_known: bool = False
    """Whether a plan within the limit has shown what else counts: the first seldom fits."""
    is_guess: bool = False
    """Whether what is set aside is that of a rough plan, which may have far more on its way."""

    def problem(self) -> Problem:
        """The problem, with all that counts."""
        return self.restate(self.stated, self.rows)

    def rules_out(self, solution: Solution) -> bool:
        """Whether no plan leaves what is set aside; less is, then. InfeasibleError if no plan fits,
        SolverError if that is not known, Beaten if there is none as good as the one in hand."""
        mesh = self.request.mesh
        if solution.status is Status.BEATEN:
            is_tight = self.stated.usage_limit is not None and solution.is_limiting
            raise Beaten(self.request.name, solution.bound, is_tight=is_tight)
        if solution.status is Status.LIMIT:
            raise SolverError(f"mesh {mesh}: no plan was found in time; raise the time limit")
        if solution.status is not Status.INFEASIBLE:
            return False
        conflict = solution.conflict
        if conflict is None or not any(self.rows.values()):
            reason = str(solution.statistics.get("reason", ""))
            raise infeasible(mesh, conflict, reason, self.problem())
        if self.is_guess:
            self.rows, self.is_guess = dict.fromkeys(self.rows, 0), False
            return True
        if self.is_smallest:
            raise self.failure()
        # Another plan may have less of what is not counted.
        missing, self.is_smallest = conflict.needed - conflict.limit, True
        self.rows = {point: max(0, aside - missing) for point, aside in self.rows.items()}
        return True

    def holds(self, solution: Solution, resolved: Solution, costs: CostBreakdown) -> bool:
        """Whether the plan fits that a `solution` of the problem comes to, `resolved` once nothing
        is open any more. If not, what breaks the limit counts from now on. SolverError if the plan
        does not cost what the solver says."""
        mesh, estimates = self.request.mesh, costs.estimates
        self.is_known = self.stated.usage_limit is not None
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
        if not over:
            return True
        self._learn(solution, over)
        self.is_guess = solution.is_rough
        return False

    def _limit(self, point: PeakCandidate | None = None) -> int:
        request = self.request
        return request.host_memory_bytes if point == ON_HOST else request.memory_limit_bytes

    def _learn(self, solution: Solution, fullest: Mapping[PeakCandidate, int]) -> None:
        """Counts the `fullest` moments of a plan, and sets aside what it breaks the limit with
        there beside what counts. Nothing is set aside before any moment counts."""
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
                f"{_on(self.request.mesh)}: the smallest-memory plan found has "
                f"{format_bytes(on_host)} per device in its host's memory, "
                f"{format_bytes(on_host - share)} over its share of {format_bytes(share)}. "
                "Raise --memory-host, use more devices, or more --microbatches"
            )
        return InfeasibleError(
            f"{_on(self.request.mesh)}: the smallest-memory plan found peaks at "
            f"{format_bytes(memory.total)} per device, {format_bytes(memory.total - limit)} over "
            f"the memory limit of {format_bytes(limit)}; {format_bytes(memory.transient)} of it is "
            "temporary. Raise --memory-limit, use more devices, or lower the batch"
        )


def _counted(stated: Problem, problem: Problem, choice: Sequence[int]) -> list[int]:
    """Bytes at each moment that `problem` counts and `stated` does not, in order."""
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
    """`solution` with a bound on more plans than those it was chosen from: those of the problem as
    it was stated, before temporaries were set aside, or those on other meshes."""
    bound = min(bound, solution.objective)
    status = Status.OPTIMAL if bound == solution.objective else Status.FEASIBLE
    return replace(solution, status=status, bound=bound)


def infeasible(
    mesh: Mesh, conflict: Conflict | None, reason: str = "", problem: Problem | None = None
) -> InfeasibleError:
    """Why there is no plan of a `problem`: what is missing, and what holds it, if that is memory,
    the device's or the host's."""
    on_host = problem is not None and conflict is not None and conflict.time in problem.other_limits
    message = describe_conflict(conflict, on_host=on_host) if conflict else reason
    return InfeasibleError(f"{_on(mesh)}: {message or 'no combination of choices is allowed'}")


def _on(mesh: Mesh) -> str:
    return f"mesh {mesh or 'of one device'}"
