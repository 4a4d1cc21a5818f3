"""What the segments of a model take in a pipeline, and how long its stages take then.

Equal segments that follow one another are a kind. A few segments of each kind are planned as a
stage, on the meshes of a part of the cluster (`segment_plans`). They are planned without a memory
limit, and within some if needed. The cuts follow from what they take (`segment_division`), in a
fraction of the time that a plan of the model takes, however deep it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cluster.mesh_shapes import size_of_mesh
from autopar.cluster.parts import part_of
from autopar.driver.search.incumbent import CandidateSearch, Trail
from autopar.driver.search.infeasible_subset import suited
from autopar.driver.search.meshes import finer_meshes, likely_first, meshes_of, refined_ns
from autopar.driver.search.segment_division import Divided, SegmentDivision
from autopar.driver.search.segment_plans import FreePlans, SegmentPlans
from autopar.driver.search.segments import SampledStep
from autopar.errors import StageError, UnsuitedMeshError
from autopar.ir.graph import Graph
from autopar.ir.mesh import MESH_OF_RANK, Mesh
from autopar.ir.passes.microbatches import in_other_microbatches
from autopar.ir.pipeline import PipelineSchedule, Waiting
from autopar.plans.memory_refinement import Beaten
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.requests.request import GraphRequest, PlanRequest


class SegmentSearch:
    """The segments of a request's step, in any number of microbatches."""

    def __init__(self, graph_request: GraphRequest, trail: Trail) -> None:
        self.graph_request, self.trail = graph_request, trail
        self._sampled: dict[bool, SampledStep] = {}
        self._free = FreePlans()

    def _sample(self, microbatches: int) -> SampledStep:
        # Steps of several microbatches differ in their extents alone.
        is_whole = microbatches == 1
        if is_whole not in self._sampled:
            graph = step_graph(self.graph_request.graph, StepForm(microbatches))
            self._sampled[is_whole] = SampledStep(graph, self.graph_request.options.policy)
        return self._sampled[is_whole]

    def divided(
        self,
        actions: PipelineSchedule,
        known_ns: int | None = None,
        mesh: str = "",
        sizes: Sequence[int] = (),
    ) -> Divided:
        """The best stages for `actions`. Ranks share the cluster evenly, on any mesh, on a given
        `mesh`, or each on its own of several (`meshes_text`). With `sizes` each rank has one of
        these numbers of devices, on the mesh of that many with the shortest segments.

        Beaten if all even divisions are estimated to take `known_ns` or more, InfeasibleError if
        none fit in memory, StageError if the model cannot be cut so.
        """
        self.trail.go_on()
        if sizes:
            return self._mixed(actions, sizes)
        sample, text = self._sample(actions.microbatches), mesh or self.graph_request.options.mesh
        if not self.graph_request.options.cuts and len(sample.parts) < actions.num_stages:
            raise StageError(
                f"{actions.num_stages} stages are more than the model has parts: "
                f"{len(sample.parts)}"
            )
        if MESH_OF_RANK in text:
            return self._given(actions, text.split(MESH_OF_RANK))
        part = self._part(
            actions, self.graph_request.cluster.num_devices // len(actions.rows), text
        )
        often = sample.least_often(sample.busiest, actions)
        search = CandidateSearch[Divided](
            self.trail,
            cost_ns=lambda stages: stages.step_ns,
            bound_ns=lambda stages: stages.bound_ns,
            fits=lambda stages: stages.is_within,
            cutoff=known_ns,
        )
        known: dict[tuple[int, ...], float] = {}
        for on in self._meshes(part, search, known):
            with search.attempt() as tried:
                self.trail.go_on()
                plans, least_ns = part.plans(on), tried.needed_ns
                try:
                    plans.plan_free(None if least_ns is None else int(least_ns / often))
                except Beaten as beaten:
                    known[on.sizes] = least = int(beaten.bound * often)
                    raise Beaten(str(on), least) from None
                division = SegmentDivision(self.graph_request, sample, actions, [plans], self.trail)
                tried.result = division.divided(least_ns)
                known[on.sizes] = tried.result.step_ns
        return search.result(str(actions.num_stages))

    def _meshes(
        self,
        part: _PartOfCluster,
        search: CandidateSearch[Divided],
        known: Mapping[tuple[int, ...], float],
    ) -> Iterator[Mesh]:
        """The meshes to try, one after the other."""
        yield from search.line_search(part.meshes, part.start)
        yield from self._refining(part, search, known)

    def _refining(
        self,
        part: _PartOfCluster,
        search: CandidateSearch[Divided],
        known: Mapping[tuple[int, ...], float],
    ) -> Sequence[Mesh]:
        """The meshes of three axes that may be worth a try, as in one stage: none where memory
        binds, and else those that refine meshes near the best, and near what is to be beaten."""
        policy, best = self.graph_request.options.policy, search.incumbent
        is_few = part.graph_request.cluster.num_devices < policy.refined_devices
        if is_few or best is None or best.is_tight or not best.is_within:
            return ()
        needed_ns = min(best.step_ns, search.cutoff or best.step_ns)
        near = [
            (refined_ns(mesh, known), mesh)
            for mesh in finer_meshes(part.graph_request)
            if refined_ns(mesh, known) <= needed_ns * (1 + policy.refined_within)
        ]
        return [mesh for _, mesh in sorted(near, key=lambda each: each[0])[: policy.refined_most]]

    def _mixed(self, actions: PipelineSchedule, sizes: Sequence[int]) -> Divided:
        """The best stages for `actions` whose ranks each have one of `sizes` devices, on the mesh
        of that many with the shortest segments. InfeasibleError or StageError if there are none."""
        sample = self._sample(actions.microbatches)
        plans = [self._quickest(actions, size) for size in sizes]
        return SegmentDivision(self.graph_request, sample, actions, plans, self.trail).divided()

    def _given(self, actions: PipelineSchedule, texts: Sequence[str]) -> Divided:
        """The best stages whose ranks have these meshes. ClusterError if they cannot."""
        sample, distinct = self._sample(actions.microbatches), list(dict.fromkeys(texts))
        plans: list[SegmentPlans] = []
        for text in distinct:
            part = self._part(actions, size_of_mesh(text), text)
            plans.append(part.plans(part.meshes[part.start]))
            plans[-1].plan_free(None)
        given = tuple(distinct.index(text) for text in texts)
        return SegmentDivision(
            self.graph_request, sample, actions, plans, self.trail, given
        ).divided()

    def _quickest(self, actions: PipelineSchedule, size: int) -> SegmentPlans:
        """Plans of segments on the mesh of `size` devices on which the busiest are shortest.
        InfeasibleError if nothing can be computed on any."""
        part, busiest = (
            self._part(actions, size, "auto"),
            self._sample(actions.microbatches).busiest,
        )
        search = CandidateSearch[SegmentPlans](
            self.trail, cost_ns=lambda plans: plans.of_stages[busiest][0].solution.objective
        )
        for mesh in search.line_search(part.meshes, part.start):
            with search.attempt() as tried:
                self.trail.go_on()
                plans = part.plans(mesh)
                plans.plan_free(tried.needed_ns)
                tried.result = plans
        return search.result()

    def _part(self, actions: PipelineSchedule, size: int, mesh: str) -> _PartOfCluster:
        """Segments on the meshes of a part of `size` devices, or on one of them."""
        sample, whole = self._sample(actions.microbatches), self.graph_request.graph
        graphs = [
            in_other_microbatches(graph, whole, actions.microbatches) for graph in sample.stages
        ]
        options = replace(
            self.graph_request.options, microbatches=actions.microbatches, loss_chunks=1, mesh=mesh
        )
        cluster = part_of(self.graph_request.cluster, size)
        segment_request = replace(
            self.graph_request,
            graph=graphs[sample.busiest],
            cluster=cluster,
            options=options,
            tolerance=options.policy.segments_tolerance,
        ).while_waiting(_most(actions), is_split=actions.is_split)
        if self.graph_request.options.rank_meshes:
            (only,) = meshes_of(cluster, options)
            segment_request = segment_request.standing_for(segment_request.graph, only)
        return _PartOfCluster(segment_request, sample, actions, graphs, self._free, self.trail)


class _PartOfCluster:
    """Segments, as `graphs` of stages, on a part of the cluster, whose `meshes` are in a line."""

    def __init__(
        self,
        graph_request: GraphRequest,
        sample: SampledStep,
        actions: PipelineSchedule,
        graphs: Sequence[Graph],
        free: FreePlans,
        trail: Trail,
    ) -> None:
        self.graph_request, self.sample, self.actions = graph_request, sample, actions
        self.graphs, self.free, self.trail = graphs, free, trail
        requests = suited(graph_request, meshes_of(graph_request.cluster, graph_request.options))
        self.meshes = sorted((request.mesh for request in requests), key=_place)
        self.start = self.meshes.index(requests[likely_first(requests)[0]].mesh)
        """The place of the mesh that is likely to be good."""

    def plans(self, mesh: Mesh) -> SegmentPlans:
        """The plans on a mesh, at first none."""
        each = [_on(mesh, graph, self.graph_request) for graph in self.graphs]
        return SegmentPlans(self.sample, self.actions, each, self.free, self.trail)


def _place(mesh: Mesh) -> tuple[int, ...]:
    """The place of a mesh in a line of those of equal size, by the size of its last axis, so that
    neighbours differ in little. The largest is first: less of it is likely to be better."""
    last = mesh.sizes[-1] if len(mesh.sizes) > 1 else 1
    return len(mesh.sizes) > 2, -last, *mesh.sizes


def _on(mesh: Mesh, graph: Graph, graph_request: GraphRequest) -> PlanRequest:
    """The request for segments on `mesh`; without the strategy if that says nothing of them."""
    segment_request = graph_request.standing_for(graph, mesh)
    try:
        return segment_request.on(mesh).opened()
    except UnsuitedMeshError:
        return (
            replace(segment_request, options=replace(segment_request.options, strategy=""))
            .on(mesh)
            .opened()
        )


def _most(actions: PipelineSchedule) -> tuple[Waiting, ...]:
    """The most other microbatches that wait in any stage of a schedule."""
    waiting = [each for stage in range(actions.num_stages) for each in actions.others(stage)]
    return (Waiting(max(w.backward for w in waiting), max(w.weights for w in waiting)),)
