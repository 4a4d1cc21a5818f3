"""Plans of the segments of a model on one mesh: without a memory limit, and within some."""

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
"""A mesh, a stage, and whether the step is in one microbatch: then its stages may be others."""

_Form = tuple[int, bool]
"""The number of microbatches, and whether backward has two parts."""


class FreePlans:
    """Plans of segments without a memory limit, and lower bounds on their time."""

    def __init__(self) -> None:
        self.plans: dict[tuple[_Place, _Form], Candidate] = {}
        self._bounds: dict[_Place, dict[_Form, int]] = {}

    def bound_ns(self, place: _Place, form: _Form) -> int:
        """A lower bound on the time: more microbatches, or a backward in two parts, never take less
        time."""
        count, is_split = form
        known = self._bounds.get(place, {}).items()
        return max((ns for (n, two), ns in known if n <= count and two <= is_split), default=0)

    def add(self, place: _Place, form: _Form, bound_ns: int, candidate: Candidate | None) -> None:
        """Stores the plan `candidate`, if any, and its bound."""
        self._bounds.setdefault(place, {})[form] = bound_ns
        if candidate is not None:
            self.plans[place, form] = candidate


class SegmentPlans:
    """The plans of the stages that stand for the segments of a model, on the mesh of `requests`.
    Each stage has a list of plans, in the order of their memory limits."""

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
        """How many times the time of each stage a rank takes."""

    @property
    def mesh(self) -> Mesh:
        return self.requests[0].mesh

    def plan_free(self, cutoff: int | None) -> None:
        """Plans all stages without a limit. Beaten if no plan of the busiest stage takes less than
        `cutoff`."""
        self.say(f"{self.mesh}: what segments take")
        busiest = self.sample.busiest
        for stage in (busiest, *(k for k in range(len(self.of_stages)) if k != busiest)):
            self.of_stages[stage].append(self._without_limit(stage, cutoff))

    def _without_limit(self, stage: int, cutoff: int | None) -> Candidate:
        """The plan of a stage without a limit. It serves all orders, which differ in the
        microbatches that wait meanwhile."""
        request, table = self.requests[stage], self.actions
        place = request.mesh.text, stage, table.microbatches == 1
        form = table.microbatches, table.is_split
        least = cutoff if stage == self.sample.busiest else None
        known_ns = self.free.bound_ns(place, form)
        if least is not None and known_ns >= least:
            raise Beaten(request.name, known_ns)
        candidate = self.free.plans.get((place, form))
        if candidate is None:
            try:
                candidate = best_as_stated(request, self._stated(stage, None), self.say, least)
            except Beaten as beaten:
                self.free.add(place, form, beaten.bound, None)
                raise
            self.free.add(place, form, candidate.solution.bound, candidate)
        now = replace(candidate.request, in_flight=request.in_flight, others=request.others)
        if now == candidate.request:
            return candidate
        return replace(
            candidate, request=now, estimates=cost_breakdown(now, candidate.structure).estimates
        )

    def plan_within(self, limit_bytes: int) -> None:
        """Plans stages within `limit_bytes` and the host's memory, divided among segments alone,
        unless their plans fit already. No such plan is too slow to be of use: a stage takes some
        segments from each plan."""
        for stage, plans in enumerate(self.of_stages):
            limit, last = int(limit_bytes / self.each[stage]), plans[-1]
            if last.estimates.memory.total <= limit:
                continue
            request = self.requests[stage]
            request = request.within(limit, int(request.host_memory_bytes / self.each[stage]))
            stated = self._stated(stage, limit)
            try:
                plan = best_as_stated(request, stated, self.say, None, last.solution.basis)
                plans.append(plan)
            except InfeasibleError as error:
                self.say(f"{error}")

    def _stated(self, stage: int, limit: int | None) -> Problem:
        if stage not in self.stated:
            self.stated[stage] = price(self.requests[stage])
        return replace(self.stated[stage], usage_limit=limit)

    @property
    def is_tight(self) -> bool:
        """Whether some plans have a limit."""
        return any(len(plans) > 1 for plans in self.of_stages)

    def narrowed(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The choices of ops in any of the plans."""
        labels: dict[str, dict[str, None]] = {}
        for plan in (plan for plans in self.of_stages for plan in plans):
            # Recompute is decided for each stage.
            own = {n.key for n in plan.request.graph.with_role(Role.OP) if not is_end(n)}
            for key, label in plan.structure.ops.items():
                if key in own:
                    labels.setdefault(key, {})[label] = None
        yield from ((key, tuple(sorted(choices))) for key, choices in sorted(labels.items()))


def segment_plan_of(plan: Candidate, share: float, mesh: int) -> SegmentPlan:
    """The costs of a segment that is the part `share` of a plan on mesh number `mesh`."""
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
