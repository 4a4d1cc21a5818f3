"""A plan within the memory limit. A problem counts what is held when the forward phase ends, and
at the moments that plans before have shown to be the fullest. What is not counted there, such as
messages under way, is known once a plan is: where that breaks the limit, it is set aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, SolverError
from autopar.ir.mesh import Mesh
from autopar.ir.moments import Moment
from autopar.ir.problem import Basis, Conflict, Problem, Solution, Status
from autopar.ir.units import format_bytes, format_ns
from autopar.plans.decisions import describe_conflict
from autopar.plans.estimates import Estimates
from autopar.plans.plan import Structure
from autopar.plans.request import PlanRequest

MAX_ROUNDS = 10
"""How many plans are made within a limit, each with more that counts than the one before."""

_MOMENTS = 8
"""How many moments of one plan come to count."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a plan costs. `fullest` has, per window, the moment at which most is held and how many
    bytes that is, most first."""

    estimates: Estimates
    fullest: tuple[tuple[Moment, int], ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan found on one mesh, and the problem that it solves: the one stated, with the
    moments that count and what is set aside."""

    request: PlanRequest
    problem: Problem
    structure: Structure
    estimates: Estimates
    solution: Solution
    is_tight: bool = False
    """Whether memory decides: without a limit another plan may be better, by more than is
    tolerated."""
    moments: tuple[Moment, ...] = ()
    """Those that count."""

    @property
    def mesh(self) -> Mesh:
        """Where the plan lies."""
        return self.request.mesh


class Beaten(Exception):
    """A mesh has no plan as good as the one in hand, or none was found; `bound` is below all of its
    plans. It `is_tight` if there might be without a memory limit."""

    def __init__(self, mesh: Mesh, bound: int, *, is_tight: bool = False) -> None:
        super().__init__(f"{mesh}: nothing better; at least {format_ns(bound)}")
        self.bound, self.is_tight = bound, is_tight


@dataclass(slots=True)
class Fitting:
    """What is known on the way to a plan that fits, of those of the problem as it was `stated`.

    `restate` makes it one that counts what is held at moments, so many bytes set aside at each:
    `rows`. Plans that fit take `bound` nanoseconds or more; `estimates` and `basis` are the last.
    """

    request: PlanRequest
    stated: Problem
    restate: Callable[[Problem, Mapping[Moment, int]], Problem]
    say: Callable[[str], None]
    rows: Mapping[Moment, int] = field(default_factory=dict[Moment, int])
    bound: int = 0
    basis: Basis | None = None
    estimates: Estimates | None = None
    is_leanest: bool = False
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
            raise Beaten(mesh, solution.bound, is_tight=is_tight)
        if solution.status is Status.LIMIT:
            raise SolverError(f"mesh {mesh}: no plan was found in time; raise the time limit")
        if solution.status is not Status.INFEASIBLE:
            return False
        conflict = solution.conflict
        if conflict is None or not any(self.rows.values()):
            raise infeasible(mesh, conflict, str(solution.statistics.get("reason", "")))
        if self.is_guess:
            self.rows, self.is_guess = dict.fromkeys(self.rows, 0), False
            return True
        if self.is_leanest:
            raise self.failure()
        # Another plan may have less of what is not counted.
        missing, self.is_leanest = conflict.needed - conflict.limit, True
        self.rows = {moment: max(0, aside - missing) for moment, aside in self.rows.items()}
        return True

    def holds(self, solution: Solution, found: Solution, bill: Bill) -> bool:
        """Whether the plan fits that a `solution` of the problem comes to, `found` once nothing is
        open any more. If not, what breaks the limit counts from now on. SolverError if the plan
        does not cost what the solver says."""
        mesh, estimates = self.request.mesh, bill.estimates
        self.is_known = self.stated.usage_limit is not None
        if estimates.modelled_ns != found.objective:
            raise SolverError(
                f"mesh {mesh}: the plan costs {estimates.modelled_ns} ns by its own bill and "
                f"{found.objective} ns by the solver's; this is a defect of autopar"
            )
        if not any(self.rows.values()):
            self.bound = max(self.bound, solution.bound)
        self.estimates = estimates
        if estimates.memory.total <= self.request.memory_limit_bytes:
            return True
        self._learn(solution, dict(bill.fullest[:_MOMENTS]))
        self.is_guess = solution.is_rough
        return False

    def _learn(self, solution: Solution, fullest: Mapping[Moment, int]) -> None:
        """Counts the `fullest` moments of a plan, and sets aside what it breaks the limit with
        there beside what counts. Nothing is set aside before any moment counts."""
        rows = {moment: self.rows.get(moment, 0) for moment in (*self.rows, *fullest)}
        if self.rows:
            self.say(f"{self.request.mesh}: memory exceeds the limit for a moment; solving again")
            counted = _counted(self.stated, self.restate(self.stated, rows), solution.choice)
            for (moment, aside), known in zip([*rows.items()], counted, strict=True):
                held = fullest.get(moment, 0)
                if held > self.request.memory_limit_bytes:
                    rows[moment] = max(held - (known - aside), aside + 1)
        self.rows = rows

    def failure(self) -> InfeasibleError:
        """Why no plan fits."""
        assert self.estimates is not None
        memory, limit = self.estimates.memory, self.request.memory_limit_bytes
        return InfeasibleError(
            f"{_on(self.request.mesh)}: the leanest plan found peaks at "
            f"{format_bytes(memory.total)} per device, {format_bytes(memory.total - limit)} over "
            f"the memory limit of {format_bytes(limit)}; {format_bytes(memory.transient)} of it is "
            "temporary. Raise --memory-limit, use more devices, or lower the batch"
        )


def lacks_host_memory(found: Candidate) -> bool:
    """Whether parameters live on the host, and a device has more there than its share. The host of
    a CPU has no other memory."""
    cluster = found.request.cluster
    is_over = found.estimates.host_bytes > cluster.host.memory_bytes
    return is_over and bool(found.request.hosted) and cluster.device.kind != "cpu"


def check_host(found: Candidate) -> None:
    """InfeasibleError if what lives on the host does not fit there."""
    if lacks_host_memory(found):
        held, room = found.estimates.host_bytes, found.request.cluster.host.memory_bytes
        raise InfeasibleError(
            f"{_on(found.mesh)}: {format_bytes(held)} per device in the memory of its host, of "
            f"which each has {format_bytes(room)}"
        )


def _counted(stated: Problem, problem: Problem, choice: Sequence[int]) -> list[int]:
    """Bytes at each moment that `problem` counts and `stated` does not, in order."""
    first = _end(stated)
    found = [0] * (_end(problem) - first)
    for usages, c in zip(problem.usages, choice, strict=True):
        for usage in usages:
            if usage.start >= first:
                found[usage.start - first] += int(usage.amounts[c])
    return found


def _end(problem: Problem) -> int:
    return max(usage.stop for usages in problem.usages for usage in usages)


def bounded(solution: Solution, bound: int) -> Solution:
    """`solution` with a bound on more plans than those it was chosen from: those of the problem as
    it was stated, before temporaries were set aside, or those on other meshes."""
    bound = min(bound, solution.objective)
    status = Status.OPTIMAL if bound == solution.objective else Status.FEASIBLE
    return replace(solution, status=status, bound=bound)


def infeasible(mesh: Mesh, conflict: Conflict | None, reason: str = "") -> InfeasibleError:
    """Why there is no plan: what is missing, and what holds it, if that is memory."""
    told = describe_conflict(conflict) if conflict else reason
    return InfeasibleError(f"{_on(mesh)}: {told or 'no combination of choices is allowed'}")


def _on(mesh: Mesh) -> str:
    return f"mesh {mesh or 'of one device'}"
