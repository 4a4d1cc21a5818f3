"""Plans in stages: where to cut, each stage's own plan on its part of the cluster, and the order in
which the stages work.

For each number of stages and microbatches a few segments of the model are planned, on the meshes of
a part of the cluster, which gives the mesh, the cuts and about how long the step takes
(`segment_ways`). Of the best of these each stage is planned, within the memory that its
microbatches in flight leave (`stage_plans`). The step is that of all stages played together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.cluster.parts import part_of, place_parts
from autopar.cost_model.device_memory import StageMemory, device_memory
from autopar.cost_model.pipeline import add_up
from autopar.cost_model.sends import delays, message_bytes, shared_at_end, tied_in
from autopar.driver.finding import Finding
from autopar.driver.incumbent import CandidateSearch, Trail
from autopar.driver.narrower import findings, with_narrower
from autopar.driver.pipeline_shapes import PipelineShape, imposed_on
from autopar.driver.promising_shapes import Promising
from autopar.driver.segment_division import Divided
from autopar.driver.segment_ways import SegmentWays
from autopar.driver.stage_plans import AskedOfRank, plan_stages
from autopar.ir.graph import Graph
from autopar.ir.problem import Status
from autopar.ir.stages import Cut
from autopar.plans.estimates import Delay, Memory
from autopar.plans.fitting import Candidate
from autopar.plans.layout import Layout, parse_layout
from autopar.plans.passes import StepForm, step_graph
from autopar.plans.pipelines import play_pipeline
from autopar.plans.policy import Policy
from autopar.plans.request import Asked, Narrowed


def search_stages(asked: Asked, trail: Trail, known: Finding | None = None) -> Finding:
    """The plan in several stages with the shortest step among those that are asked for, if it is
    shorter than the one that is `known`; else that. StageError if the model cannot be cut so;
    InfeasibleError if nothing fits in memory."""
    return with_narrower(partial(_shortest, known), asked, trail, known)


def _shortest(known: Finding | None, asked: Asked, trail: Trail) -> Finding:
    tried = findings(trail)
    if known is not None:
        tried.offer(known)
    promising = Promising(asked, SegmentWays(asked, trail), tried)
    _plan_the_best(asked, promising)
    if tried.incumbent is None:
        # Stages hold more than their segments do: those that were left out may be all that fit.
        for shape, divided in promising.left():
            _plan(asked, promising, shape, divided)
    found = tried.result()
    return found if found is known else replace(found, others=promising.others(found))


def _plan(
    asked: Asked, promising: Promising, shape: PipelineShape, divided: Divided
) -> Finding | None:
    """Tries one shape."""
    tried = promising.tried
    pipeline = _Pipeline(asked, shape, divided, tried.trail)
    found = tried.attempt(lambda _: pipeline.planned(), name=shape.name).found
    if found is not None:
        promising.planned[shape] = found
    return found


def _plan_the_best(asked: Asked, promising: Promising) -> None:
    """Plans shapes that may be the best. What one takes beyond its estimate is taken to hold for
    all of as many ranks, whose stages have the same devices."""
    left, tried, policy = promising.best(), promising.tried, asked.options.policy
    least: float | None = None
    longer: dict[int, float] = {}

    def hoped_ns(each: tuple[PipelineShape, Divided]) -> float:
        return longer.get(each[0].ranks, 1.0) * each[1].step_ns

    for number in range(len(left)):
        first = min(left, key=hoped_ns)
        why = _unworthy(tried, number, hoped_ns(first), least, policy)
        if why:
            tried.trail.skip(f"other pipelines ({len(left)})", why)
            return
        left.remove(first)
        shape, divided = first
        found = _plan(asked, promising, shape, divided)
        if found is not None and tried.incumbent is not None:
            longer[shape.ranks] = found.step_ns / divided.step_ns
            # Others may take less than that, beyond their estimates.
            least = least or max(divided.step_ns, tried.incumbent.step_ns)


def _unworthy(
    tried: CandidateSearch[Finding],
    number: int,
    step_ns: float,
    least: float | None,
    policy: Policy,
) -> str:
    """Why, after so many others, a pipeline that is expected to take `step_ns` is not planned, if
    it is not: plans take longer than they are estimated to."""
    if least is not None and step_ns > policy.estimate_near * least:
        return f"estimate_near {policy.estimate_near:g}"
    if tried.incumbent is None:
        return ""
    if number >= policy.pipelines_planned:
        return f"pipelines_planned {policy.pipelines_planned}"
    return "longer than the best plan" if step_ns >= tried.incumbent.step_ns else ""


class _Pipeline:
    """One shape, planned."""

    def __init__(self, asked: Asked, shape: PipelineShape, divided: Divided, trail: Trail) -> None:
        self.asked, self.shape, self.divided, self.trail = asked, shape, divided, trail
        self.table = shape.table
        sizes = [mesh.num_devices for mesh in divided.meshes]
        self.clusters = [part_of(asked.cluster, size) for size in sizes]
        self.firsts = place_parts(asked.cluster, sizes)

    def planned(self) -> Finding:
        """The plan with the cuts that were chosen.

        Segments are planned each for itself: what one leaves in shards the next may want whole.
        Where that takes much longer than was estimated, other choices may do better.
        """
        self.trail(f"planning {self.shape.name}")
        starts = self.divided.starts
        forms = [
            StepForm(self.shape.microbatches, Cut(starts, number))
            for number in range(len(starts) + 1)
        ]
        graphs = [step_graph(self.asked.graph, form) for form in forms]
        choices, narrowed = findings(self.trail), self.divided.narrowed
        kept_ns = self.asked.options.policy.estimate_kept * self.divided.step_ns
        tried = choices.attempt(lambda _: self._planned(graphs, narrowed))
        if tried.found is None or tried.found.step_ns > kept_ns:
            self.trail("with other choices than those of segments")
            choices.attempt(lambda _: self._planned(graphs, dict.fromkeys(narrowed, ())))
        return choices.result()

    def _planned(self, graphs: Sequence[Graph], narrowed: Mapping[str, Narrowed]) -> Finding:
        table, starts = self.table, self.divided.starts
        ranks = [self._asked_of(rank, narrowed) for rank in range(self.shape.ranks)]
        found = plan_stages(ranks, graphs, table, self._held, self.trail)
        layouts, cluster = _layouts(found), self.asked.cluster
        sends, tied = self._delays(layouts), tied_in(layouts)
        shared = shared_at_end(self.asked.graph, tied, table.ranks, cluster, self.firsts)
        devices = [layout.mesh.num_devices for layout in layouts]
        stages, held = [each.estimates for each in found], self._held(found)
        estimates = add_up(table, stages, devices, sends, shared, held, cluster)
        # Of some stages the strategy has nothing to say.
        strategy = self.asked.options.strategy
        told = next(each for each in found if each.request.options.strategy == strategy).request
        objective_ns = self.divided.objective_ns or estimates.step_ns
        return Finding(
            self.asked,
            tuple(found),
            estimates,
            objective_ns,
            min(self.divided.bound_ns, self.divided.objective_ns),
            Status.FEASIBLE.value,
            starts=("", *starts),
            first_ranks=tuple(self.firsts[table.ranks[stage]] for stage in range(len(found))),
            schedule=self.shape.stored,
            rows=self.shape.rows,
            imposed=(*told.describe_imposed(), *imposed_on(self.asked.options)),
        )

    def _delays(self, layouts: Sequence[Layout]) -> Sequence[Delay]:
        firsts = [self.firsts[self.table.ranks[stage]] for stage in range(len(layouts))]
        return delays(layouts, firsts, self.asked.cluster)

    def _held(self, found: Sequence[Candidate]) -> tuple[Memory, ...]:
        """What a device of each rank holds where its stages are planned so."""
        layouts, granule = _layouts(found), self.asked.cluster.device.granule_bytes
        estimates = [each.estimates for each in found]
        spans = play_pipeline(self.table, estimates, self._delays(layouts), ()).spans
        stages = [
            StageMemory(layout, each.estimates.memory, each.turn_memory, granule)
            for layout, each in zip(layouts, found, strict=True)
        ]
        return device_memory(self.table, stages, spans, message_bytes(layouts, granule))

    def _asked_of(self, rank: int, narrowed: Mapping[str, Narrowed]) -> AskedOfRank:
        """What is asked of the stages of a rank."""
        mesh = self.divided.meshes[rank].text
        options = replace(self.asked.options, mesh=mesh, microbatches=self.shape.microbatches)
        asked = replace(self.asked, cluster=self.clusters[rank], options=options)
        return AskedOfRank(asked, narrowed[mesh])


def _layouts(found: Sequence[Candidate]) -> list[Layout]:
    return [parse_layout(each.request.step, each.structure) for each in found]
