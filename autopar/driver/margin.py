"""By how much the best plan beats the best one of another structure.

Of another structure is a plan on another mesh whose weights are sharded otherwise, or one that
gives enough of the weights other roles on the same mesh (`weight_layouts`). The best of the
latter is the solution of a problem of its own, the plan's with a few nodes more, so that the solver
proves it as it proves the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.compile import Say
from autopar.cost_model.moments import with_moments
from autopar.driver.search import Survey, estimates_of
from autopar.ir.moments import ON_HOST
from autopar.ir.problem import Status
from autopar.plans.fitting import Candidate
from autopar.plans.plan import Margin
from autopar.plans.weight_layouts import describe, find_roles, signature
from autopar.solver import solve
from autopar.solver.exact import MAX_CHOICES

_TRIES = 4
"""How often a rival is solved for with less memory, as its temporaries break the limit."""

_MAX_ITERATIONS = 20_000
"""Steps of the simplex method in one linear program: twice what 32 layers of a llama take. Some
problems, such as an encoder with a decoder, would take ten times as many as the plan did."""


@dataclass(slots=True)
class _Found:
    """What is known: no plan of another structure is below any of `bounds`, and the best one in
    hand takes `step_ns` and does otherwise what `text` says."""

    bounds: list[int]
    step_ns: int | None = None
    text: str = ""

    def offer(self, step_ns: int, text: str) -> None:
        """The first of equals stays."""
        if self.step_ns is None or step_ns < self.step_ns:
            self.step_ns, self.text = step_ns, text

    def margin(self, objective: int) -> Margin | None:
        """All of it, if it says more than that no plan is below `objective`."""
        if self.step_ns is not None:
            return Margin(min([*self.bounds, self.step_ns]), self.step_ns, self.text)
        bound = min(self.bounds, default=0)
        return Margin(bound, None, "") if bound > objective else None


def find_margin(survey: Survey, say: Say) -> Margin | None:
    """The margin of the plan that a search found best, among what its options admit; None where
    no plan has another structure, or where the problem is too large to say."""
    say("looking for the best plan of another structure")
    best = survey.best
    own = _Mesh(best, say)
    found, alike = _Found([]), [own]
    for tried in survey.tried:
        if tried.found is None:
            found.bounds.append(tried.bound)
        elif tried.mesh != best.mesh:
            mesh = _Mesh(tried.found, say)
            if mesh.signature == own.signature:
                alike.append(mesh)
            else:
                found.bounds.append(tried.bound)
                found.offer(tried.found.solution.objective, f"mesh {tried.mesh}")
    for mesh in alike:
        mesh.look(found, "" if mesh is own else f"mesh {mesh.name}, ")
    return found.margin(best.solution.objective)


class _Mesh:
    """Plans of another structure than the best one on a mesh."""

    def __init__(self, best: Candidate, say: Say) -> None:
        self._best = best
        self._say = say
        self._roles = find_roles(best.request.step, best.problem)
        self._chosen = self._roles.of(best.problem, best.solution.choice)
        self.name = str(best.mesh)

    @property
    def signature(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The roles of each class, comparable between meshes."""
        return tuple(signature(roles, self._best.mesh.sizes) for roles in self._chosen)

    def look(self, found: _Found, prefix: str) -> None:
        """Adds to `found` what is known of the plans."""
        best = self._best
        if found.step_ns is not None and best.solution.bound >= found.step_ns:
            return
        if sum(map(len, best.problem.costs)) > MAX_CHOICES:
            found.bounds.append(best.solution.bound)
            return
        limit = allowance = best.estimates.memory_limit
        counted = best.problem
        for attempt in range(_TRIES):
            # What the plan's temporaries take was set aside; others may need less, or more.
            stated = replace(counted, usage_limit=allowance)
            problem = self._roles.elsewhere(stated, self._chosen)
            if problem is None:
                return
            solution = solve(problem, progress=self._say, max_iterations=_MAX_ITERATIONS)
            if solution.status is Status.INFEASIBLE:
                return
            if attempt == 0:
                found.bounds.append(solution.bound)
            if not solution.choice:
                return
            choice = solution.choice[: len(stated.keys)]
            plan = replace(solution, choice=choice)
            held = estimates_of(best, plan)
            excess, share = held.memory.total - limit, best.request.host_memory_bytes
            if excess <= 0 and held.host_bytes <= share:
                changes = describe(
                    [weights.name for weights in self._roles.classes],
                    self._chosen,
                    self._roles.of(stated, choice),
                    best.mesh.names,
                )
                found.offer(solution.objective, prefix + changes)
                return
            allowance -= max(0, excess)
            if held.host_bytes > share:
                counted = with_moments(best.request, counted, {ON_HOST: 0})
