"""Plans in stages: where to cut, each stage's own plan on its part of the cluster, and the order in
which the stages work.

For each number of stages and microbatches a few segments of the model are planned, on the meshes of
a part of the cluster. That gives the mesh, the cuts and an estimate of the step (`segment_search`).
For the best of these each stage is planned, within the memory that its microbatches in flight leave
(`stage_plans`). The step is simulated with all stages together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cluster.parts import part_of, place_parts
from autopar.cost_model.pipeline import StageMemory, add_up, device_memory
from autopar.cost_model.sends import delays, message_bytes, shared_at_end, tied_in
from autopar.driver.search.finding import Finding
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.narrower import Widened, findings
from autopar.driver.search.pipeline_candidates import PipelineCandidates
from autopar.driver.search.pipeline_shapes import PipelineShape, PipelineShapes, imposed_on
from autopar.driver.search.segment_division import Divided
from autopar.driver.search.segment_search import SegmentSearch
from autopar.driver.search.stage_plans import plan_stages
from autopar.ir.passes.stages import Cut
from autopar.ir.problem import Status
from autopar.plans.estimates import Delay, Memory
from autopar.plans.layout import Layout, parse_layout
from autopar.plans.memory_refinement import Candidate
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.requests.request import GraphRequest, Narrowed


def search_stages(
    graph_request: GraphRequest, trail: Trail, known: Finding | None = None
) -> Finding:
    """The plan in several stages with the shortest step; `known` if none is shorter than that.
    StageError if the model cannot be cut as requested; InfeasibleError if nothing fits in
    memory."""
    widened = Widened(graph_request, trail, known)
    for each in widened:
        with widened.attempt() as tried:
            pipelines = findings(trail)
            if known is not None:
                pipelines.submit(known)
            candidates = PipelineCandidates(PipelineShapes(each), pipelines)
            segments = SegmentSearch(each, trail)
            for shape, mesh in candidates.to_divide():
                with candidates.dividing(shape):
                    known_ns = candidates.known_ns()
                    divided = segments.divided(shape.actions, known_ns, mesh, shape.sizes)
                    candidates.estimate(shape, divided)
            for shape, stages in candidates.to_plan():
                if stages is None:
                    with candidates.dividing(shape):
                        divided = segments.divided(shape.actions, sizes=shape.sizes)
                        candidates.estimate(shape, divided)
                    continue
                with pipelines.attempt(name=shape.name) as planned:
                    planned.result = _Pipeline(each, shape, stages, trail).planned()
                candidates.take(shape, planned.result)
            tried.result = candidates.result(known)
    return widened.result()


class _Pipeline:
    """The plan of one shape."""

    def __init__(
        self, graph_request: GraphRequest, shape: PipelineShape, divided: Divided, trail: Trail
    ) -> None:
        self.graph_request, self.shape, self.divided, self.trail = (
            graph_request,
            shape,
            divided,
            trail,
        )
        self.actions = shape.actions
        sizes = [mesh.num_devices for mesh in divided.meshes]
        self.clusters = [part_of(graph_request.cluster, size) for size in sizes]
        self.firsts = place_parts(graph_request.cluster, sizes)

    def planned(self) -> Finding:
        """The plan with the cuts that were chosen.

        Segments are planned one by one: one may leave in shards what the next takes whole. If the
        step is much longer than its estimate, other choices may be better, and are tried as well.
        """
        self.trail(f"planning {self.shape.name}")
        starts, narrowed = self.divided.starts, self.divided.narrowed
        forms = [
            StepForm(self.shape.microbatches, Cut(starts, number))
            for number in range(len(starts) + 1)
        ]
        graphs = [step_graph(self.graph_request.graph, form) for form in forms]
        choices = findings(self.trail)
        accepted_ns = self.graph_request.options.policy.estimate_slack * self.divided.step_ns
        for each in (narrowed, dict.fromkeys(narrowed, ())):
            if choices.incumbent is not None and choices.incumbent.step_ns <= accepted_ns:
                break
            if choices.last is not None:
                self.trail("with other choices than those of segments")
            with choices.attempt() as tried:
                self.trail.go_on()
                ranks = [self._rank_request(rank, each) for rank in range(self.shape.ranks)]
                tried.result = self._finding(
                    plan_stages(ranks, graphs, self.actions, self._held, self.trail)
                )
        if choices.stopped is not None:
            self.trail.note(f"{self.shape.name}: other choices", "skipped", None, self.trail.why)
        return choices.result()

    def _finding(self, candidates: Sequence[Candidate]) -> Finding:
        """The planned stages, with their step."""
        table, starts = self.actions, self.divided.starts
        layouts, cluster = _layouts(candidates), self.graph_request.cluster
        sends, tied = self._delays(layouts), tied_in(layouts)
        shared = shared_at_end(self.graph_request.graph, tied, table.ranks, cluster, self.firsts)
        devices = [layout.mesh.num_devices for layout in layouts]
        stages, held = [each.estimates for each in candidates], self._held(candidates)
        estimates = add_up(table, stages, devices, sends, shared, held, cluster)
        # The strategy says nothing of some stages.
        strategy = self.graph_request.options.strategy
        request = next(
            each for each in candidates if each.request.options.strategy == strategy
        ).request
        objective_ns = self.divided.objective_ns or estimates.step_ns
        return Finding(
            self.graph_request,
            tuple(candidates),
            estimates,
            objective_ns,
            min(self.divided.bound_ns, self.divided.objective_ns),
            Status.FEASIBLE.value,
            starts=("", *starts),
            first_ranks=tuple(self.firsts[table.ranks[stage]] for stage in range(len(candidates))),
            schedule=self.shape.stored,
            rows=self.shape.rows,
            imposed=(*request.describe_imposed(), *imposed_on(self.graph_request.options)),
        )

    def _delays(self, layouts: Sequence[Layout]) -> Sequence[Delay]:
        firsts = [self.firsts[self.actions.ranks[stage]] for stage in range(len(layouts))]
        return delays(layouts, firsts, self.graph_request.cluster)

    def _held(self, candidates: Sequence[Candidate]) -> tuple[Memory, ...]:
        """The memory of a device of each rank, with these plans of its stages."""
        layouts, granule = _layouts(candidates), self.graph_request.cluster.device.granule_bytes
        estimates = [each.estimates for each in candidates]
        spans = simulate_pipeline(self.actions, estimates, self._delays(layouts), ()).spans
        stages = [
            StageMemory(layout, each.estimates.memory, each.microbatch_memory, granule)
            for layout, each in zip(layouts, candidates, strict=True)
        ]
        return device_memory(self.actions, stages, spans, message_bytes(layouts, granule))

    def _rank_request(self, rank: int, narrowed: Mapping[str, Narrowed]) -> GraphRequest:
        """The request for the stages of a rank."""
        mesh = self.divided.meshes[rank].text
        options = replace(
            self.graph_request.options, mesh=mesh, microbatches=self.shape.microbatches
        )
        return replace(
            self.graph_request,
            cluster=self.clusters[rank],
            options=options,
            narrowed=narrowed[mesh],
        )


def _layouts(candidates: Sequence[Candidate]) -> list[Layout]:
    return [parse_layout(each.request.step, each.structure) for each in candidates]
