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

from msgspec import structs

from autopar.cluster.parts import part_of, place_parts
from autopar.compile import Say
from autopar.cost_model.device_memory import StageMemory, device_memory
from autopar.cost_model.pipeline import add_up
from autopar.cost_model.sends import delays, message_bytes, shared_at_end, tied_in
from autopar.driver.offers import Offers
from autopar.driver.pipeline_shapes import PipelineShape, imposed_on
from autopar.driver.promising_shapes import NEAR, Promising
from autopar.driver.search import explaining
from autopar.driver.segment_division import Divided
from autopar.driver.segment_ways import SegmentWays
from autopar.driver.stage_plans import AskedOfRank, plan_stages
from autopar.driver.writing import found_by, write_plan
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.stages import in_stages
from autopar.ir.units import format_ns
from autopar.plans.estimates import Delay, Estimates, Memory
from autopar.plans.fitting import Candidate
from autopar.plans.layout import Layout, parse_layout
from autopar.plans.pipelines import play_pipeline
from autopar.plans.plan import Plan
from autopar.plans.request import Asked, Narrowed

_AS_THOUGHT = 1.1
"""Up to which part of the step that its segments were thought to take a pipeline is as expected.
Mostly it is within a few per cent; where memory binds hard, 13 were seen. Where what segments send
one another was not thought of, small models took twice as long."""


def search_stages(
    asked: Asked, say: Say, known: Plan | None = None, *, only_several: bool = False
) -> Plan:
    """The plan with the shortest step among those that are asked for, in one stage too where their
    number is open: `known`, if that is planned; none, if `only_several` are looked for. StageError
    if the model cannot be cut so; InfeasibleError if nothing fits in memory."""
    tried, ways = Offers(say, known), SegmentWays(asked, say)
    promising = Promising(asked, ways, tried, only_several=only_several)
    _plan_the_best(asked, say, promising, ways)
    is_left = promising.is_open and promising.has_plain is None
    if is_left and promising.looks_better_plain():
        promising.plan_plain()
    if tried.best is None:
        # Stages hold more than their segments do: those that were left out may be all that fit.
        for shape, divided in promising.left():
            graph = ways.graph(shape.microbatches)
            tried.offer(_Pipeline(asked, shape, divided, say).plan, graph)
    if tried.best is None and promising.is_open:
        with explaining(promising.in_one, say):
            return tried.found()
    return tried.found()


def _plan_the_best(asked: Asked, say: Say, promising: Promising, ways: SegmentWays) -> None:
    """Offers plans of the shapes that may be the best. What one takes that is not as was thought is
    taken to hold for all of as many ranks, whose stages have the same devices."""
    left, tried = promising.best(), promising.tried
    plain = promising.plain if promising.has_plain else None
    least = None if plain is None else plain.step_ns
    longer: dict[int, float] = {}

    def hoped_ns(each: tuple[PipelineShape, Divided]) -> float:
        return longer.get(each[0].ranks, 1.0) * each[1].step_ns

    for number in range(len(left)):
        first = min(left, key=hoped_ns)
        is_near = least is None or hoped_ns(first) <= NEAR * least
        if not is_near or tried.is_enough(number, hoped_ns(first)):
            return
        left.remove(first)
        shape, divided = first
        graph = ways.graph(shape.microbatches)
        found = tried.offer(_Pipeline(asked, shape, divided, say).plan, graph)
        if found is not None and tried.best is not None:
            longer[shape.ranks] = found.estimates.step_ns / divided.step_ns
            # Others may take less than that, though they were not thought to.
            least = least or max(divided.step_ns, tried.best.estimates.step_ns)


class _Pipeline:
    """One shape, planned."""

    def __init__(self, asked: Asked, shape: PipelineShape, divided: Divided, say: Say) -> None:
        self.asked, self.shape, self.divided, self.say = asked, shape, divided, say
        self.table = shape.table
        sizes = [mesh.num_devices for mesh in divided.meshes]
        self.clusters = [part_of(asked.cluster, size) for size in sizes]
        self.firsts = place_parts(asked.cluster, sizes)

    def plan(self, graph: Graph) -> Plan:
        """The plan with the cuts that were chosen of `graph`, the step in its microbatches.

        Segments are planned each for itself: what one leaves in shards the next may want whole.
        Where that takes much longer than was thought, other choices may do better.
        """
        self.say(f"planning {self.shape} ({self.shape.schedule})")
        graphs = in_stages(graph, [start for _, start in self.divided.starts])
        every = dict.fromkeys(self.divided.narrowed, ())
        try:
            found = self._planned(graphs, self.divided.narrowed)
        except InfeasibleError as error:
            self.say(f"{error}; with other choices")
            return self._planned(graphs, every)
        if found.estimates.step_ns <= _AS_THOUGHT * self.divided.step_ns:
            return found
        step = format_ns(found.estimates.step_ns)
        self.say(f"step {step}, which is more than was thought; with other choices")
        try:
            other = self._planned(graphs, every)
        except InfeasibleError as error:
            self.say(f"{error}")
            return found
        return min(found, other, key=lambda plan: plan.estimates.step_ns)

    def _planned(self, graphs: Sequence[Graph], narrowed: Mapping[str, Narrowed]) -> Plan:
        table, starts = self.table, self.divided.starts
        ranks = [self._asked_of(rank, narrowed) for rank in range(self.shape.ranks)]
        found = plan_stages(ranks, graphs, table, self._held, self.say)
        layouts, cluster = _layouts(found), self.asked.cluster
        sends, tied = self._delays(layouts), tied_in(layouts)
        shared = shared_at_end(self.asked.graph, tied, table.ranks, cluster, self.firsts)
        devices = [layout.mesh.num_devices for layout in layouts]
        stages, held = [each.estimates for each in found], self._held(found)
        estimates = add_up(table, stages, devices, sends, shared, held, cluster)
        return self._written(["", *(module for module, _ in starts)], found, estimates)

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

    def _written(
        self,
        starts: Sequence[str],
        found: Sequence[Candidate],
        estimates: Estimates,
    ) -> Plan:
        asked, shape, divided = self.asked, self.shape, self.divided
        # Of some stages the strategy has nothing to say.
        strategy = asked.options.strategy
        told = next(each for each in found if each.request.options.strategy == strategy).request
        stages = [
            structs.replace(
                each.structure, start=start, first_rank=self.firsts[self.table.ranks[k]]
            )
            for k, (start, each) in enumerate(zip(starts, found, strict=True))
        ]
        provenance = found_by(
            asked.options,
            solver=found[0].solution.solver,
            status="feasible",
            objective_ns=divided.objective_ns or estimates.step_ns,
            bound_ns=min(divided.bound_ns, divided.objective_ns),
            gap_ppm=divided.gap_ppm,
            meshes_tried=(divided.mesh_text,),
            imposed=(*told.describe_imposed(), *imposed_on(asked.options)),
        )
        where = asked.graph, asked.cluster, asked.options
        return write_plan(*where, stages, estimates, provenance, shape.stored, shape.rows)


def _layouts(found: Sequence[Candidate]) -> list[Layout]:
    return [parse_layout(each.request.graph, each.structure) for each in found]
