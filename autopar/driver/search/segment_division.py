"""Stages of a pipeline, by what the segments of a model take. They are divided among ranks that all
have one mesh, or may differ in theirs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from autopar.cluster.parts import place_parts
from autopar.compile import Say
from autopar.cost_model.sends import gradient_bytes, hop_ns, sent_bytes, shared_at_end
from autopar.driver.search.infeasible_subset import BOUNDLESS_BYTES
from autopar.driver.search.segment_plans import SegmentPlans, segment_plan_of
from autopar.driver.search.segments import SampledStep
from autopar.errors import InfeasibleError, StageError
from autopar.ir.cutting import CutProblem, Division, RankMeshes
from autopar.ir.graph import Phase
from autopar.ir.mesh import Mesh, meshes_text
from autopar.ir.passes.stages import cut_at
from autopar.ir.pipeline import PipelineSchedule
from autopar.plans.estimates import Delay, MicrobatchTimes, Shared, StageEstimates
from autopar.plans.layout import parse_layout
from autopar.plans.memory_refinement import Beaten
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.requests.request import GraphRequest, Narrowed
from autopar.solver.cutting import divide


@dataclass(frozen=True, slots=True)
class Divided:
    """Stages as they are estimated to be best, on `meshes`, one for each rank. `starts` has the
    module that each stage but the first begins with. Choices of ops are `narrowed` on each mesh, by
    its text, to those in the plans of segments.

    The busiest rank waits for the part `waits` of the step. `idle` is the part of the busiest
    rank's work for which the ranks idle on average. The stages are estimated to fit in memory if
    `is_within`, and to save some for that if `is_tight`. Nothing is proven if `bound_ns` is 0.
    """

    meshes: tuple[Mesh, ...]
    starts: tuple[str, ...]
    step_ns: int
    waits: float
    objective_ns: int
    bound_ns: int
    narrowed: dict[str, Narrowed]
    is_within: bool
    is_tight: bool
    idle: float = 0.0

    @property
    def mesh_text(self) -> str:
        """Its meshes, as an option has them."""
        return meshes_text(self.meshes)


class SegmentDivision:
    """The segments of the step of `graph_request`, on the meshes of `plans`, each with a number.
    Ranks have the meshes that are `given`, or those that are best."""

    def __init__(
        self,
        graph_request: GraphRequest,
        sample: SampledStep,
        actions: PipelineSchedule,
        plans: Sequence[SegmentPlans],
        say: Say,
        given: tuple[int, ...] = (),
    ) -> None:
        self.graph_request, self.sample, self.actions, self.say = (
            graph_request,
            sample,
            actions,
            say,
        )
        self.plans, self.given = plans, given
        self.limit = graph_request.memory_limit_bytes

    def divided(self, known_ns: int | None = None) -> Divided:
        """The best stages from the plans so far; if they do not fit, from more plans within less
        memory. StageError if ranks cannot have these meshes, whatever they hold. Beaten if they
        would take `known_ns` or more whatever they held."""
        stages = self._within()
        if stages is not None:
            return stages
        least_ns = self.boundless().step_ns
        if known_ns is not None and least_ns >= known_ns:
            raise Beaten(str(self.plans[0].mesh), least_ns)
        policy = self.graph_request.options.policy
        for part in (policy.segments_memory, policy.segments_least_memory):
            for plans in self.plans:
                plans.plan_within(int(self.limit * part))
            stages = self._within()
            if stages is not None:
                return stages
        # The stages may still fit once each is planned as a whole: more ops can be recomputed.
        return self.boundless()

    def _within(self) -> Divided | None:
        """The best stages within the memory limit, from the plans so far; None if there are
        none."""
        try:
            return self._divided(self._problem())
        except InfeasibleError as error:
            self.say(f"{meshes_text([plans.mesh for plans in self.plans])}: {error}")
            return None

    def boundless(self) -> Divided:
        """The best stages without a memory limit, from the plans so far. StageError if there are
        none."""
        try:
            boundless = replace(self._problem(), limit_bytes=BOUNDLESS_BYTES)
            return self._divided(boundless, is_within=False)
        except InfeasibleError:
            ranks = self.given or range(len(self.plans))
            text = meshes_text([self.plans[k].mesh for k in ranks])
            raise StageError(
                f"no stages are on meshes {text}: stages that share a weight have to be on equal "
                "meshes"
            ) from None

    def _problem(self) -> CutProblem:
        stages, kinds = range(self.actions.num_stages), self.sample.kinds
        return CutProblem(
            tuple(kind.count for kind in kinds),
            tuple(
                tuple(
                    segment_plan_of(plan, kind.share, mesh)
                    for mesh, plans in enumerate(self.plans)
                    for plan in plans.of_stages[kind.stage]
                )
                for kind in kinds
            ),
            tuple(self.actions.ranks[stage] for stage in stages),
            tuple(self.actions.in_flight(stage) for stage in stages),
            self.actions.microbatches,
            self.limit,
            self.actions.is_split,
            self._meshes(),
        )

    def _meshes(self) -> RankMeshes | None:
        if len(self.plans) == 1:
            return None
        ends = [0, *accumulate(kind.count for kind in self.sample.kinds)]
        alike = {
            tuple(sorted({bisect_right(ends, segment) - 1 for segment in segments}))
            for segments in self.sample.shared.values()
        }
        sizes = tuple(plans.mesh.num_devices for plans in self.plans)
        return RankMeshes(
            sizes, self.graph_request.cluster.num_devices, self.given, tuple(sorted(alike))
        )

    def _divide(self, problem: CutProblem) -> Division:
        cuts = self.graph_request.options.cuts
        if not cuts:
            return divide(problem)
        graph, starts = self.sample.graph, [part.start for part in self.sample.parts]
        ops = (cut_at(graph, module) for module in cuts)
        numbers = [sum(start <= op for start in starts[1:]) for op in ops]
        return divide(problem, problem.sizes(numbers))

    def _divided(self, problem: CutProblem, *, is_within: bool = True) -> Divided:
        division = self._divide(problem)
        parts, cuts = self.sample.parts, self.graph_request.options.cuts
        stages = [self._estimates(taken) for taken in division.taken]
        on = division.meshes(problem)
        firsts = place_parts(
            self.graph_request.cluster, [self.plans[n].mesh.num_devices for n in on]
        )
        sends, shared = self._sends(on, firsts), self._shared(division, on, firsts)
        simulated = simulate_pipeline(self.actions, stages, sends, shared)
        step_ns, busy_ns = simulated.step_ns, simulated.busy_ns
        is_proven = not cuts  # Other cuts are no bound for given ones.
        return Divided(
            tuple(self.plans[number].mesh for number in on),
            cuts or tuple(parts[k].module for k in division.starts),
            step_ns,
            1 - max(busy_ns) / max(1, step_ns),
            round(division.least_ns(problem)) if is_proven else 0,
            division.bound_ns if is_proven else 0,
            {plans.mesh.text: tuple(plans.narrowed()) for plans in self.plans},
            is_within,
            any(plans.is_tight for plans in self.plans),
            1 - sum(busy_ns) / max(1, len(busy_ns) * max(busy_ns)),
        )

    def _estimates(self, taken: Sequence[Sequence[float]]) -> StageEstimates:
        """The estimates of a stage, by how many segments of each kind it has in each plan."""
        base = self.plans[0].of_stages[0][0].estimates
        times = dict.fromkeys(
            (n for n in MicrobatchTimes.__struct_fields__ if n != "action_ns"), 0.0
        )
        for kind, numbers in zip(self.sample.kinds, taken, strict=True):
            segment_plans = [plan for plans in self.plans for plan in plans.of_stages[kind.stage]]
            for plan, number in zip(segment_plans, numbers, strict=True):
                for name in times:
                    times[name] += number * kind.share * getattr(plan.estimates.microbatch, name)
        rounded = {name: round(ns) for name, ns in times.items()}
        if self.actions.num_stages == 1:
            rounded["action_ns"] = 0  # One stage sends nothing.
        microbatch = msgspec.structs.replace(base.microbatch, **rounded)
        return msgspec.structs.replace(base, microbatch=microbatch)

    def _sends(self, on: Sequence[int], firsts: Sequence[int]) -> list[Delay]:
        """The delay of a microbatch from each stage to the next, and of its gradient back."""
        sent = [self._sent(plans) for plans in self.plans]
        last = self.actions.num_stages - 1
        forth = [(s, s + 1, Phase.FORWARD) for s in range(last)]
        back = [(s + 1, s, Phase.BACKWARD) for s in range(last)]
        delays: list[Delay] = []
        for source, target, phase in forth + back:
            a, b = self.actions.ranks[source], self.actions.ranks[target]
            # The mesh with fewer devices sends or receives more on each.
            sizes = [max(pair) for pair in zip(sent[on[a]], sent[on[b]], strict=True)]
            ns = sum(
                hop_ns(n, firsts[a], firsts[b], firsts, self.graph_request.cluster) for n in sizes
            )
            delays.append(Delay(source, target, phase.value, sum(sent[on[a]]), ns))
        return delays

    def _sent(self, plans: SegmentPlans) -> list[int]:
        plan = plans.of_stages[self.sample.busiest][0]
        return sent_bytes(parse_layout(plan.request.step, plan.structure), Phase.FORWARD)

    def _shared(
        self, division: Division, on: Sequence[int], firsts: Sequence[int]
    ) -> Sequence[Shared]:
        """What ranks share at the end of a step with this division."""
        tied: dict[str, tuple[set[int], int]] = {}
        for name, segments in self.sample.tied.items():
            stages = {bisect_right(division.starts, segment) for segment in segments}
            plans = self.plans[on[self.actions.ranks[min(stages)]]]
            for plan, *_ in plans.of_stages:
                if len(stages) > 1 and name in plan.structure.params:
                    layout = parse_layout(plan.request.step, plan.structure)
                    tied[name] = stages, gradient_bytes(layout, name)
        graph_request = self.graph_request
        return shared_at_end(
            graph_request.graph, tied, self.actions.ranks, graph_request.cluster, firsts
        )
