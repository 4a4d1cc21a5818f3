"""Plans in stages: where to cut, each stage's own plan on its part of the cluster, and the order in
which the stages work.

For each number of stages and microbatches a few segments of the model are planned, on the meshes of
a part of the cluster, which gives the mesh, the cuts and about how long the step takes
(`segment_ways`). Of the best of these each stage is planned, within the memory that its
microbatches in flight leave (`stage_plans`). The step is that of all stages played together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec

import torch

from autopar.cluster.parts import line_of, part_of
from autopar.compile import Say
from autopar.cost_model.pipeline import add_up
from autopar.cost_model.sends import delays
from autopar.driver.microbatching import possible_counts
from autopar.driver.search import search
from autopar.driver.segment_ways import Divided, SegmentWays
from autopar.driver.stage_plans import plan_stages
from autopar.errors import InfeasibleError, StageError
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.pipeline import ActionTable
from autopar.ir.segments import segments
from autopar.ir.stages import in_stages
from autopar.ir.units import format_ns
from autopar.ir.version import __version__
from autopar.plans.compatibility import describe_inputs
from autopar.plans.estimates import Estimates
from autopar.plans.fitting import Candidate
from autopar.plans.layout import parse_layout
from autopar.plans.options import Options
from autopar.plans.pipeline_orders import make_table
from autopar.plans.plan import (
    SCHEMA_VERSION,
    MeshAxis,
    PipelineSchedule,
    Plan,
    Provenance,
    Stage,
    Structure,
)
from autopar.plans.request import Asked

P = ParamSpec("P")

_PLANNED = 3
"""Of how many shapes all stages are planned, at most."""

_NEAR = 1.03
"""The most that one of them is thought to take, in terms of the best: what segments take is known
to some parts in a hundred."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline but for its cuts: on how many ranks, with how many stages each, in how many
    microbatches, in the order of which schedule."""

    ranks: int
    microbatches: int
    schedule: str
    chunks: int = 1

    @property
    def table(self) -> ActionTable:
        """What its ranks do."""
        return make_table(self.schedule, self.ranks, self.microbatches, self.chunks)

    def __str__(self) -> str:
        each = f", {self.chunks} on each rank" if self.chunks > 1 else ""
        return f"{self.table.num_stages} stages{each}, {self.microbatches} microbatches"


def search_stages(asked: Asked, say: Say) -> Plan:
    """The plan with the shortest step among those that are asked for, in one stage too where their
    number is open. StageError if the model cannot be cut so; InfeasibleError if nothing fits in
    memory."""
    options = asked.options
    tried = _Tried(say)
    is_open = options.stages is None and not options.cuts
    if is_open:
        plain = replace(options, stages=1, microbatches=None)
        tried.offer(lambda: search(replace(asked, options=plain), say))
    ways = SegmentWays(asked, say)
    least_ns = tried.best.estimates.step_ns if tried.best is not None else None
    found = _promising(asked, ways, tried, least_ns)
    for shape, divided in found:
        graph = ways.graph(shape.microbatches)
        tried.offer(_Pipeline(asked, shape, divided, say).plan, graph)
    return tried.found()


def _promising(
    asked: Asked, ways: SegmentWays, tried: _Tried, least_ns: int | None
) -> list[tuple[PipelineShape, Divided]]:
    """The shapes that may have the shortest step, by what their segments take, best first; none
    that is thought to take `least_ns` or more. What fails is told to `tried`."""
    found: list[tuple[PipelineShape, Divided]] = []
    is_open = asked.options.stages is None and not asked.options.cuts

    def consider(shape: PipelineShape) -> int | None:
        """What the step takes with the best stages, if that is less than with others."""
        tried.say(f"{shape} ({shape.schedule})")
        known = [least_ns, *(divided.step_ns for _, divided in found)]
        cutoff = min((ns for ns in known if ns is not None), default=None)
        try:
            divided = ways.divided(shape.table, cutoff)
        except (InfeasibleError, StageError) as error:
            tried.fail(error)
            return None
        if divided is None:
            return None
        tried.say(f"{shape}: about {format_ns(divided.step_ns)}")
        found.append((shape, divided))
        return divided.step_ns

    for ranks in _ranks(asked):
        last: int | None = None
        for count in _counts(asked, ranks):
            step_ns = consider(PipelineShape(ranks, count, *_order(asked.options)))
            if last is not None and (step_ns is None or step_ns > last):
                break
            last = step_ns
    found.sort(key=lambda each: each[1].step_ns)
    if found and asked.options.schedule == "auto" and is_open:
        best = found[0][0]
        consider(PipelineShape(best.ranks, best.microbatches, "interleaved", 2))
        found.sort(key=lambda each: each[1].step_ns)
    near = [each for each in found if each[1].step_ns <= _NEAR * found[0][1].step_ns]
    return near[:_PLANNED]


class _Tried:
    """The best plan so far, and why there was none where there was none."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.best: Plan | None = None
        self.failure: Exception | None = None

    def offer(self, make: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> None:
        """A plan, if there is one."""
        try:
            plan = make(*args, **kwargs)
        except (InfeasibleError, StageError) as error:
            self.fail(error)
            return
        step_ns = plan.estimates.step_ns
        self.say(f"step {format_ns(step_ns)}")
        if self.best is None or step_ns < self.best.estimates.step_ns:
            self.best = plan

    def fail(self, error: Exception) -> None:
        """Why there is no such plan."""
        self.say(str(error))
        self.failure = self.failure or error

    def found(self) -> Plan:
        """The best plan; the first failure if there is none."""
        if self.best is None:
            raise self.failure or StageError("the devices are not shared by as many stages")
        return self.best


def _order(options: Options) -> tuple[str, int]:
    """The schedule, and the stages on each rank."""
    name, _, chunks = options.schedule.partition(":")
    name = "1f1b" if name == "auto" else name
    return name, int(chunks or 2) if name == "interleaved" else 1


def _ranks(asked: Asked) -> Sequence[int]:
    """The numbers of ranks that pipelines may have."""
    options, devices = asked.options, asked.cluster.num_devices
    each = _order(options)[1]
    stages = len(options.cuts) + 1 if options.cuts else options.stages
    if stages is None:
        most = len(segments(asked.graph)) // each
        return [n for n in range(2, min(most, devices) + 1) if devices % n == 0]
    if stages % each:
        raise StageError(f"{stages} stages are not {each} on each rank")
    if devices % (stages // each):
        raise StageError(f"{devices} devices are not shared evenly by {stages // each} ranks")
    return [stages // each]


def _counts(asked: Asked, ranks: int) -> Sequence[int]:
    """The numbers of microbatches that are tried: of those that divide the batch, as many as there
    are ranks and more, as long as that is better."""
    if asked.options.microbatches is not None:
        return (asked.options.microbatches,)
    possible = possible_counts(asked.graph)
    return [n for n in possible if n >= ranks] or possible[-1:]


class _Pipeline:
    """One shape, planned."""

    def __init__(self, asked: Asked, shape: PipelineShape, divided: Divided, say: Say) -> None:
        self.asked, self.shape, self.divided, self.say = asked, shape, divided, say
        self.cluster = part_of(asked.cluster, asked.cluster.num_devices // shape.ranks)
        self.table = shape.table

    def plan(self, graph: Graph) -> Plan:
        """The plan with the cuts that were chosen of `graph`, the step in its microbatches."""
        self.say(f"planning {self.shape} ({self.shape.schedule})")
        table, options, ranks = self.table, self.asked.options, self.shape.ranks
        starts = self.divided.starts
        graphs = in_stages(graph, [start for _, start in starts])
        limit = options.memory_limit_bytes or self.asked.cluster.device.memory_bytes
        options = replace(
            options,
            mesh=self.divided.mesh.text,
            microbatches=self.shape.microbatches,
            memory_limit_bytes=limit * ranks // table.num_stages,
        )
        asked = replace(self.asked, cluster=self.cluster, options=options)
        in_flight = [table.in_flight(stage) for stage in range(table.num_stages)]
        found = plan_stages(asked, graphs, in_flight, self.divided.pins, self.say)
        layouts = [
            parse_layout(graph, each.structure) for graph, each in zip(graphs, found, strict=True)
        ]
        sends = delays(layouts, line_of(self.asked.cluster, ranks) if ranks > 1 else None)
        estimates = add_up(table, [each.estimates for each in found], sends)
        return self._written(["", *(module for module, _ in starts)], found, estimates)

    def _written(
        self,
        starts: Sequence[str],
        found: Sequence[Candidate],
        estimates: Estimates,
    ) -> Plan:
        asked, shape, divided = self.asked, self.shape, self.divided
        devices = self.cluster.num_devices
        stages = tuple(
            Stage(start, self.table.ranks[k] * devices, each.structure)
            for k, (start, each) in enumerate(zip(starts, found, strict=True))
        )
        structure = Structure(
            model=asked.graph.name,
            fingerprint=fingerprint(asked.graph),
            cluster=asked.cluster.name,
            axes=(MeshAxis("stage", shape.ranks),) if shape.ranks > 1 else (),
            optimizer=asked.options.optimizer,
            inputs=describe_inputs(asked.graph),
            params={},
            ops={},
            outputs={},
            routes={},
            stages=stages,
            schedule=PipelineSchedule(shape.schedule, shape.microbatches, shape.chunks),
        )
        return Plan(
            SCHEMA_VERSION,
            structure,
            estimates,
            Provenance(
                autopar=__version__,
                torch=str(torch.__version__),
                solver=found[0].solution.solver,
                status="feasible",
                objective_ns=divided.objective_ns or estimates.step_ns,
                bound_ns=min(divided.bound_ns, divided.objective_ns),
                gap_ppm=divided.gap_ppm,
                meshes_tried=(str(divided.mesh),),
                imposed=(*found[0].request.describe_imposed(), *_imposed(asked.options)),
            ),
        )


def _imposed(options: Options) -> Iterator[str]:
    """What is asked of the pipeline, as a plan records it."""
    if options.cuts:
        yield f"cuts {', '.join(options.cuts)}"
    elif options.stages is not None:
        yield f"stages {options.stages}"
    if options.schedule != "auto":
        yield f"schedule {options.schedule}"
