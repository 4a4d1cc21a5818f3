"""One stage of a step that was found, to be planned otherwise while the others stay as they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost_model.moments import with_moments
from autopar.cost_model.price import price
from autopar.driver.finding import Finding
from autopar.ir.stages import is_end
from autopar.plans.fitting import Candidate, bounded
from autopar.plans.settling import same_choice


@dataclass(frozen=True)
class StageInStep:
    """Stage `number` of a `step`. `best` is its plan."""

    step: Finding
    number: int = 0
    known: dict[int, int] = field(default_factory=dict[int, int])
    """What the step takes where the stage takes so long."""

    @property
    def name(self) -> str:
        """What it is called, where there are several."""
        return f"stage {self.number}: " if len(self.step.stages) > 1 else ""

    @cached_property
    def best(self) -> Candidate:
        """The plan, in the problem of all plans of the stage that lie as other stages do: it was
        looked for among those that have the choices of its segments."""
        found = self.step.stages[self.number]
        request, ends = found.request, {n.key for n in found.request.graph.nodes if is_end(n)}
        narrowed = tuple(each for each in request.narrowed if each[0] in ends)
        if narrowed == request.narrowed:
            return found
        wider = replace(request, narrowed=narrowed)
        stated = price(wider)
        choice = same_choice(found.problem, found.solution, stated, wider.step)
        problem = with_moments(wider, stated, dict.fromkeys(found.moments, 0))
        problem = replace(problem, usage_limit=found.problem.usage_limit)
        # Of the wider problem nothing is proven.
        solution = bounded(replace(found.solution, choice=choice, basis=None), 0)
        return replace(found, request=wider, problem=problem, solution=solution)

    def step_ns(self, modelled_ns: int) -> int:
        """What the step takes where the stage takes so long, both as modelled. Of several stages,
        the step is simulated again with that stage, which takes more or less of all that it
        does."""
        if len(self.step.stages) == 1:
            return modelled_ns
        if modelled_ns not in self.known:
            longer_ns = self.step.longer_ns(self.number, modelled_ns)
            self.known[modelled_ns] = max(0, self.step.objective_ns + longer_ns)
        return self.known[modelled_ns]
