"""Plans of the segments of a model on one mesh: without a limit of memory, and within some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from autopar.compile import Say, best_as_stated
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.driver.search.segments import SampledStep
from autopar.errors import InfeasibleError
from autopar.ir.cutting import SegmentPlan
from autopar.ir.graph import Role
from autopar.ir.mesh import Mesh
from autopar.ir.own_ops import is_end
from autopar.ir.pipeline import PipelineSchedule
from autopar.ir.problem import Problem
from autopar.plans.memory_refinement import Beaten, Candidate
from autopar.plans.requests.request import PlanRequest

_Place = tuple[str, int, bool]
"""A mesh, a stage, and whether the step is in one microbatch: its stages may be others."""

_Form = tuple[int, bool]
"""In how many microbatches, and whether backward comes in two parts."""


class FreePlans:
    """Plans of segments without a limit of memory, and what none takes less than."""

    def __init__(self) -> None:
        self.plans: dict[tuple[_Place, _Form], Candidate] = {}
        self._bounds: dict[_Place, dict[_Form, int]] = {}

    def bound_ns(self, place: _Place, form: _Form) -> int:
        """What is known that none takes less than: more microbatches, or a backward in two parts,
        never take less time."""
        count, is_split = form
        known = self._bounds.get(place, {}).items()
        return max((ns for (n, two), ns in known if n <= count and two <= is_split), default=0)

    def add(self, place: _Place, form: _Form, bound_ns: int, candidate: Candidate | None) -> None:
        """Takes what is `candidate`, or known of it."""
        self._bounds.setdefault(place, {})[form] = bound_ns
        if candidate is not None:
            self.plans[place, form] = candidate


class SegmentPlans:
    """The plans of the stages that stand for the segments of a model, on the mesh of `requests`:
    of each a list in the order of the memory that they are within."""

    def __init__(
        self,
        sample: SampledStep,
        actions: PipelineSchedule,
        requests: Sequence[PlanRequest],
        free: FreePlans,
        say: Say,
    ) -> None:
        self.sample, self.actions, self.requests = sample, actions, requests
        self.free, self.say = free, say
        self.stated: dict[int, Problem] = {}
        self.of_stages: list[list[Candidate]] = [[] for _ in requests]
        self.each = [max(1.0, sample.often(k) / len(actions.rows)) for k in range(len(requests))]
        """How often a rank takes what each of the stages takes."""

    @property
    def mesh(self) -> Mesh:
        return self.requests[0].mesh

    def plan_free(self, cutoff: int | None) -> None:
        """Plans all without a limit. Beaten if no plan of the busiest stage takes less than
        `cutoff`."""
        self.say(f"{self.mesh}: what segments take")
        busiest = self.sample.busiest
        for stage in (busiest, *(k for k in range(len(self.of_stages)) if k != busiest)):
            self.of_stages[stage].append(self._without_limit(stage, cutoff))

    def _without_limit(self, stage: int, cutoff: int | None) -> Candidate:
        """The plan of a stage, whatever it holds. Other orders have the same, and hold another
        number of microbatches meanwhile."""
        request, table = self.requests[stage], self.actions
        place = request.mesh.text, stage, table.microbatches == 1
        form = table.microbatches, table.is_split
        least = cutoff if stage == self.sample.busiest else None
        known_ns = self.free.bound_ns(place, form)
        if least is not None and known_ns >= least:
            raise Beaten(request.name, known_ns)
        found = self.free.plans.get((place, form))
        if found is None:
            try:
                found = best_as_stated(request, self._stated(stage, None), self.say, least)
            except Beaten as beaten:
                self.free.add(place, form, beaten.bound, None)
                raise
            self.free.add(place, form, found.solution.bound, found)
        now = replace(found.request, in_flight=request.in_flight, others=request.others)
        if now == found.request:
            return found
        return replace(found, request=now, estimates=cost_breakdown(now, found.structure).estimates)

    def plan_within(self, limit_bytes: int) -> None:
        """Plans within so much memory, if it and the host's were shared by segments alone, where
        those that there are are not. None is too slow: stages have some segments in each way."""
        for stage, plans in enumerate(self.of_stages):
            limit, last = int(limit_bytes / self.each[stage]), plans[-1]
            if last.estimates.memory.total <= limit:
                continue
            request = self.requests[stage]
            request = request.within(limit, int(request.host_memory_bytes / self.each[stage]))
            stated = self._stated(stage, limit)
            try:
                found = best_as_stated(request, stated, self.say, None, last.solution.basis)
                plans.append(found)
            except InfeasibleError as error:
                self.say(f"{error}")

    def _stated(self, stage: int, limit: int | None) -> Problem:
        if stage not in self.stated:
            self.stated[stage] = price(self.requests[stage])
        return replace(self.stated[stage], usage_limit=limit)

    @property
    def is_tight(self) -> bool:
        """Whether some are within a limit."""
        return any(len(plans) > 1 for plans in self.of_stages)

    def narrowed(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The choices of ops that any of the plans has."""
        labels: dict[str, dict[str, None]] = {}
        for plan in (plan for plans in self.of_stages for plan in plans):
            # What is recomputed has to be settled for each stage.
            own = {n.key for n in plan.request.graph.with_role(Role.OP) if not is_end(n)}
            for key, label in plan.structure.ops.items():
                if key in own:
                    labels.setdefault(key, {})[label] = None
        yield from ((key, tuple(sorted(found))) for key, found in sorted(labels.items()))


def segment_plan_of(plan: Candidate, share: float, mesh: int) -> SegmentPlan:
    """What a segment takes that has such a share of what is planned on mesh number `mesh`."""
    estimates, microbatch = plan.estimates, plan.estimates.microbatch
    memory, time_ns = (
        estimates.memory,
        microbatch.forward_ns + microbatch.backward_ns + microbatch.weights_ns,
    )
    last_ns = microbatch.last_forward_ns + microbatch.last_backward_ns + microbatch.last_weights_ns
    static = memory.params + memory.gradients + memory.optimizer + memory.accumulated
    return SegmentPlan(
        ceil(share * time_ns),
        ceil(share * static),
        ceil(share * (memory.unsharded + memory.saved) / plan.request.in_flight),
        ceil(share * (max(0, last_ns - time_ns) + microbatch.update_ns)),
        ceil(share * microbatch.forward_ns),
        mesh,
    )
