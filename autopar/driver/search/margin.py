"""By how much the best plan beats the best one of another structure.

A plan is of another structure in two cases. It is on another mesh with weights sharded otherwise,
or it gives enough of the weights other roles on the same mesh (`weight_layouts`). The second case
is a problem of its own: the plan's with a few nodes more. The solver proves its solution as it
proves the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.compile import Say
from autopar.cost_model.peak_rows import PeakRows
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
    """Plans of another structure: none is below any of `bounds`, and the best so far takes
    `step_ns` and differs as `text` says."""

    bounds: list[int]
    step_ns: int | None = None
    text: str = ""

    def submit(self, step_ns: int, text: str) -> None:
        """Adds a plan. The first of equals stays."""
        if self.step_ns is None or step_ns < self.step_ns:
            self.step_ns, self.text = step_ns, text

    def margin(self) -> Margin | None:
        """The margin; None if nothing is known of plans of another structure."""
        if self.step_ns is not None:
            return Margin(min([*self.bounds, self.step_ns]), self.step_ns, self.text)
        return Margin(min(self.bounds), None, "") if self.bounds else None


def find_margin(best: Finding, trail: Trail) -> Margin | None:
    """The margin of the `best` plan of a search, among the plans that its options admit. None if no
    plan has another structure.

    Of several stages, one at a time has another structure, and the step is simulated anew: the
    other stages do not adapt.
    """
    trail("looking for the best plan of another structure")
    known, alike = _KnownPlans([]), list[_Stage]()
    own = [_Stage(StageInStep(best, number), trail) for number in _distinct(best)]
    for other in best.others:
        if other.finding is None:
            known.bounds.append(other.bound_ns)
            continue
        if other.finding.meshes == best.meshes:
            continue
        if len(best.stages) == len(other.finding.stages) == 1:
            there = _Stage(StageInStep(other.finding), trail, f"{other.name}, ")
            if there.signature == own[0].signature:
                alike.append(there)
                continue
        known.bounds.append(other.bound_ns)
        known.submit(_as_beside(best, other.finding), other.name)
    for stage in (*own, *alike):
        stage.look(known)
    return known.margin()


def _as_beside(best: Finding, other: Finding) -> int:
    """Another plan's step as modelled. If one of both plans has several stages, they are modelled
    differently, and the difference of the simulated steps counts."""
    if len(best.stages) == len(other.stages) == 1:
        return other.objective_ns
    return max(1, best.objective_ns + other.step_ns - best.step_ns)


def _distinct(best: Finding) -> list[int]:
    """The numbers of stages, one for each group of stages that share a plan."""
    first: dict[object, int] = {}
    for number, stage in enumerate(best.stages):
        first.setdefault((stage.mesh.text, id(stage.problem)), number)
    return [*first.values()]


class _Stage:
    """Plans of another structure for one stage."""

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
        """Adds the best plan of another structure to `known`."""
        best, policy = self._best, self._best.request.options.policy
        if known.step_ns is not None and self._place.step_ns(best.solution.bound) >= known.step_ns:
            return
        if sum(map(len, best.problem.costs)) > MAX_CHOICES:
            known.bounds.append(self._place.step_ns(best.solution.bound))
            return
        limit = allowance = best.request.memory_limit_bytes
        counted = best.problem
        for attempt in range(policy.rival_tries):
            # The limit is without the plan's temporaries; other plans may need less, or more.
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
                counted = PeakRows(best.request)(counted, {ON_HOST: 0})

    def _changes(self, stated: Problem, choice: Sequence[int]) -> str:
        """How the other plan differs."""
        names = [weights.name for weights in self._roles.classes]
        there = self._roles.of(stated, choice)
        return describe(names, self._chosen, there, self._best.mesh.names)
