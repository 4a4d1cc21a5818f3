"""By how much the best plan beats the best one of another structure.

Of another structure is a plan on another mesh whose weights are sharded otherwise, or one that
gives enough of the weights other roles on the same mesh (`weight_layouts`). The best of the
latter is the solution of a problem of its own, the plan's with a few nodes more, so that the solver
proves it as it proves the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.compile import Say
from autopar.cost_model.peak_rows import with_peak_rows
from autopar.driver.search.finding import Finding, StageInStep
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.meshes import estimates_of
from autopar.driver.search.weight_layouts import describe, find_roles, signature
from autopar.ir.peak_candidates import ON_HOST
from autopar.ir.problem import Problem, Status
from autopar.plans.provenance import Margin
from autopar.solver import solve
from autopar.solver.exact import MAX_CHOICES


@dataclass(slots=True)
class _KnownPlans:
    """What is known: no plan of another structure is below any of `bounds`, and the best one in
    hand takes `step_ns` and does otherwise what `text` says."""

    bounds: list[int]
    step_ns: int | None = None
    text: str = ""

    def submit(self, step_ns: int, text: str) -> None:
        """The first of equals stays."""
        if self.step_ns is None or step_ns < self.step_ns:
            self.step_ns, self.text = step_ns, text

    def margin(self, objective: int) -> Margin | None:
        """All of it, if it says more than that no plan is below `objective`."""
        if self.step_ns is not None:
            return Margin(min([*self.bounds, self.step_ns]), self.step_ns, self.text)
        bound = min(self.bounds, default=0)
        return Margin(bound, None, "") if bound > objective else None


def find_margin(best: Finding, trail: Trail) -> Margin | None:
    """The margin of the plan that a search found best, among what its options admit; None where
    no plan has another structure, or where the problem is too large to say.

    Of several stages, each in turn has another structure, and the step is simulated again: what
    the others do is not adapted."""
    trail("looking for the best plan of another structure")
    found, alike = _KnownPlans([]), list[_Stage]()
    own = [_Stage(StageInStep(best, number), trail) for number in _distinct(best)]
    for other in best.others:
        if other.finding is None:
            found.bounds.append(other.bound_ns)
            continue
        if other.finding.meshes == best.meshes:
            continue
        if len(best.stages) == len(other.finding.stages) == 1:
            there = _Stage(StageInStep(other.finding), trail, f"{other.name}, ")
            if there.signature == own[0].signature:
                alike.append(there)
                continue
        found.bounds.append(other.bound_ns)
        found.submit(_as_beside(best, other.finding), other.name)
    for stage in (*own, *alike):
        stage.look(found)
    return found.margin(best.objective_ns)


def _as_beside(best: Finding, other: Finding) -> int:
    """What another plan takes as modelled; beside one in another number of stages, of which other
    things are modelled, by what it takes longer as simulated."""
    if len(best.stages) == len(other.stages) == 1:
        return other.objective_ns
    return max(1, best.objective_ns + other.step_ns - best.step_ns)


def _distinct(best: Finding) -> list[int]:
    """The stages, one of each that are planned alike."""
    found: dict[object, int] = {}
    for number, stage in enumerate(best.stages):
        found.setdefault((stage.mesh.text, id(stage.problem)), number)
    return [*found.values()]


class _Stage:
    """Plans of another structure than the one of a stage has."""

    def __init__(self, place: StageInStep, say: Say, name: str = "") -> None:
        self._place, self._best, self._say = place, place.best, say
        self._name = name or place.name
        self._roles = find_roles(self._best.request.step, self._best.problem)
        self._chosen = self._roles.of(self._best.problem, self._best.solution.choice)

    @property
    def signature(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The roles of each class, comparable between meshes."""
        return tuple(signature(roles, self._best.mesh.sizes) for roles in self._chosen)

    def look(self, known: _KnownPlans) -> None:
        """Adds to `known` what is known of the plans."""
        best, policy = self._best, self._best.request.options.policy
        if known.step_ns is not None and self._place.step_ns(best.solution.bound) >= known.step_ns:
            return
        if sum(map(len, best.problem.costs)) > MAX_CHOICES:
            known.bounds.append(self._place.step_ns(best.solution.bound))
            return
        limit = allowance = best.request.memory_limit_bytes
        counted = best.problem
        for attempt in range(policy.rival_tries):
            # What the plan's temporaries take was set aside; others may need less, or more.
            stated = replace(counted, usage_limit=allowance)
            problem = self._roles.elsewhere(stated, self._chosen)
            if problem is None:
                return
            iterations = policy.rival_iterations
            solution = solve(problem, progress=self._say, max_iterations=iterations)
            if solution.status is Status.INFEASIBLE:
                return
            if attempt == 0:
                known.bounds.append(self._place.step_ns(solution.bound))
            if not solution.choice:
                return
            choice = solution.choice[: len(stated.keys)]
            held = estimates_of(best, replace(solution, choice=choice))
            excess, share = held.memory.total - limit, best.request.host_memory_bytes
            if excess <= 0 and held.host_bytes <= share:
                known.submit(
                    self._place.step_ns(solution.objective),
                    self._name + self._changes(stated, choice),
                )
                return
            allowance -= max(0, excess)
            if held.host_bytes > share:
                counted = with_peak_rows(best.request, counted, {ON_HOST: 0})

    def _changes(self, stated: Problem, choice: Sequence[int]) -> str:
        """What another plan does otherwise."""
        names = [weights.name for weights in self._roles.classes]
        there = self._roles.of(stated, choice)
        return describe(names, self._chosen, there, self._best.mesh.names)
