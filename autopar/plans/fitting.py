"""A plan within the memory limit, though a problem counts only what is held when the forward phase
ends: where the temporaries on top of it, known once the plan is, break the limit, they are set
aside, and the problem is solved again with what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError, SolverError
from autopar.ir.mesh import Mesh
from autopar.ir.problem import Problem, Solution, Status
from autopar.ir.units import format_bytes, format_ns
from autopar.plans.decisions import describe_conflict
from autopar.plans.plan import Estimates, Structure
from autopar.plans.request import PlanRequest

MAX_TIGHTENINGS = 8
"""How often a problem is solved again."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best plan found on one mesh, and the problem that it solves: the one stated, with what
    temporaries need set aside."""

    request: PlanRequest
    problem: Problem
    structure: Structure
    estimates: Estimates
    solution: Solution

    @property
    def mesh(self) -> Mesh:
        """Where the plan lies."""
        return self.request.mesh


class Beaten(Exception):
    """A mesh has no plan as good as the one in hand; `bound` is below all of its plans."""

    def __init__(self, mesh: Mesh, bound: int) -> None:
        super().__init__(f"{mesh}: at least {format_ns(bound)}, which is no better")
        self.bound = bound


@dataclass(slots=True)
class Fitting:
    """What is known on the way to a plan that fits: that of the problem as it was `stated` takes
    `bound` nanoseconds or more; the last one found has these `estimates`, and `counted` bytes of it
    are in the problem, of which the next may have `allowance`."""

    request: PlanRequest
    stated: Problem
    say: Callable[[str], None]
    bound: int = 0
    estimates: Estimates | None = None
    counted: int = 0
    allowance: int = 0

    def problems(self) -> Iterator[Problem]:
        """The problem as it is stated, and with less and less memory. Leaner plans may have other
        temporaries: that one breaks the limit does not mean that all do."""
        yield self.stated
        tightenings, estimates = 0, None
        while self.allowance < self.counted:
            if estimates is not self.estimates:
                tightenings, estimates = tightenings + 1, self.estimates
            if tightenings > MAX_TIGHTENINGS:
                return
            yield replace(self.stated, usage_limit=self.allowance)

    def rules_out(self, solution: Solution) -> bool:
        """Whether no plan holds so little. InfeasibleError if the problem as stated has none,
        SolverError if that is not known, Beaten if there is none as good as the one in hand."""
        mesh = self.request.mesh
        if solution.status is Status.BEATEN:
            raise Beaten(mesh, solution.bound)
        if solution.status is Status.LIMIT:
            raise SolverError(f"mesh {mesh}: no plan was found in time; raise the time limit")
        if solution.status is not Status.INFEASIBLE:
            return False
        if self.estimates is None:
            raise InfeasibleError(f"{_on(mesh)}: {describe_conflict(solution)}")
        needed = self.counted if solution.conflict is None else solution.conflict.needed
        self.allowance = max(self.allowance + 1, needed)
        return True

    def holds(self, solution: Solution, found: Solution, estimates: Estimates) -> bool:
        """Whether the plan fits that `solution` of the problem comes to, `found` once nothing is
        open any more. SolverError if it does not cost what the solver says."""
        mesh = self.request.mesh
        if estimates.modelled_ns != found.objective:
            raise SolverError(
                f"mesh {mesh}: the plan costs {estimates.modelled_ns} ns by its own bill and "
                f"{found.objective} ns by the solver's; this is a defect of autopar"
            )
        if self.estimates is None:
            self.bound = solution.bound
        self.estimates = estimates
        excess = estimates.memory.total - self.request.memory_limit_bytes
        if excess > 0:
            if self.stated.usage_limit is not None:
                self.say(f"{mesh}: temporaries exceed the memory limit; solving again with less")
            usages = zip(self.stated.usages, solution.choice, strict=True)
            self.counted = sum(int(usage[c]) for usage, c in usages)
            self.allowance = self.counted - excess
        return excess <= 0

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


def bounded(solution: Solution, bound: int) -> Solution:
    """`solution` with a bound on more plans than those it was chosen from: those of the problem as
    it was stated, before temporaries were set aside, or those on other meshes."""
    bound = min(bound, solution.objective)
    status = Status.OPTIMAL if bound == solution.objective else Status.FEASIBLE
    return replace(solution, status=status, bound=bound)


def _on(mesh: Mesh) -> str:
    return f"mesh {mesh or 'of one device'}"
