"""Plans in stages: where to cut, each stage's own plan on its part of the cluster, and the order in
which the stages work.

For each number of stages and microbatches a few segments of the model are planned, on the meshes of
a part of the cluster, which gives the mesh, the cuts and about how long the step takes
(`segment_ways`). Of the best of these each stage is planned, within the memory that its
microbatches in flight leave (`stage_plans`). The step is that of all stages played together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ParamSpec

import torch

from autopar.cluster.parts import line_of, part_of
from autopar.compile import Say
from autopar.cost_model.pipeline import add_up
from autopar.cost_model.sends import delays, shared_at_end, tied_in
from autopar.driver.climbing import climb
from autopar.driver.pipeline_shapes import (
    PipelineShape,
    imposed_on,
    numbers_of_microbatches,
    numbers_of_ranks,
    other_orders,
    shaped,
)
from autopar.driver.search import meshes_of, search
from autopar.driver.segment_ways import Divided, SegmentWays
from autopar.driver.stage_plans import STAGE_TOLERANCE, plan_stages
from autopar.errors import InfeasibleError, StageError, UnsuitedMeshError
from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.stages import in_stages
from autopar.ir.units import format_ns
from autopar.ir.version import __version__
from autopar.plans.compatibility import describe_inputs
from autopar.plans.estimates import Estimates
from autopar.plans.fitting import Candidate
from autopar.plans.layout import parse_layout
from autopar.plans.plan import (
    SCHEMA_VERSION,
    MeshAxis,
    Plan,
    Provenance,
    Stage,
    Structure,
)
from autopar.plans.request import Asked

_P = ParamSpec("_P")

_PLANNED = 3
"""Of how many shapes there are plans of all stages, at most."""

_TURNS = 4
"""In how many microbatches for each rank pipelines are considered first: with fewer ranks wait for
a fifth of the step or more, and hold more."""

_FEW = 5
"""How many meshes are all planned in one stage, whatever it takes: 32 devices have no more."""

_FAR = 1.2
"""How many times as long as it was thought to take a step takes of which that was no knowledge."""

_NEAR = 1.03
"""The most that one of them is thought to take, in terms of the best that fits: what segments take
is known to some parts in a hundred."""


def search_stages(asked: Asked, say: Say) -> Plan:
    """The plan with the shortest step among those that are asked for, in one stage too where their
    number is open. StageError if the model cannot be cut so; InfeasibleError if nothing fits in
    memory."""
    tried, ways = _Tried(say), SegmentWays(asked, say)
    promising = _Promising(asked, ways, tried)
    shapes = promising.best()
    plain = promising.plain if promising.has_plain else None
    least = None if plain is None else plain.step_ns
    for number, (shape, divided) in enumerate(shapes):
        is_near = least is None or divided.step_ns <= _NEAR * least
        if not is_near or tried.is_enough(number, divided.step_ns):
            break
        graph = ways.graph(shape.microbatches)
        if tried.offer(_Pipeline(asked, shape, divided, say).plan, graph):
            least = least or divided.step_ns
    is_left = promising.is_open and promising.has_plain is None
    if is_left and promising.looks_better_plain():
        promising.plan_plain()
    if tried.best is None:
        # Stages hold more than their segments do: those that were left out may be all that fit.
        for shape, divided in promising.left():
            graph = ways.graph(shape.microbatches)
            tried.offer(_Pipeline(asked, shape, divided, say).plan, graph)
    return tried.found()


class _Promising:
    """The shapes that may have the shortest step, by what their segments take. What fails is told
    to `tried`."""

    def __init__(self, asked: Asked, ways: SegmentWays, tried: _Tried) -> None:
        self.asked, self.ways, self.tried = asked, ways, tried
        self.found: list[tuple[PipelineShape, Divided]] = []
        options = asked.options
        self.is_open = options.stages is None and not options.cuts and options.table is None
        self.plain: Divided | None = None
        """What a step in one stage is thought to be, where that is open and known."""
        self.has_plain: bool | None = None
        """Whether there is a plan in one stage; None where it was not looked for."""
        self._failed: set[PipelineShape] = set()
        """Those that cannot be, or not in that much memory."""

    def may_be_plain(self) -> bool:
        """Whether one stage may be as good as any number that is thought to fit in memory."""
        thought_ns = self._thought_ns()
        if self.plain is None:
            return False
        return thought_ns is None or self.plain.step_ns <= _NEAR * thought_ns

    def looks_better_plain(self) -> bool:
        """Whether one stage may be better than the best plan of some, which may take longer than
        they were thought to: far longer where what was thought is of no use."""
        best, thought_ns = self.tried.best, self._thought_ns()
        if best is None or thought_ns is None or best.estimates.step_ns > _FAR * thought_ns:
            return True
        self.plain = self._plain(best.estimates.step_ns)
        return self.plain is not None

    def plan_plain(self) -> None:
        """Offers the plan in one stage."""
        self.has_plain = self.tried.offer_any(search, self._plain_asked(), self.tried.say)

    def _weigh_plain(self) -> None:
        """Plans one stage, where that may be as good as what was found so far: what it takes is
        then known, and shapes that take longer are left out early."""
        thought_ns = self._thought_ns()
        self.plain = self._plain(None if thought_ns is None else int(_NEAR * thought_ns))
        if self.may_be_plain():
            self.plan_plain()

    def _plain_asked(self) -> Sequence[Asked]:
        """One stage, on any mesh: where there are many and memory binds, so that each takes long,
        first on the best by what segments take."""
        whole = replace(self.asked, options=replace(self.asked.options, stages=1))
        has_many = len(meshes_of(whole.cluster, whole.options)) > _FEW
        if self.plain is None or not self.plain.is_tight or not has_many:
            return (whole,)
        options = replace(whole.options, mesh=self.plain.mesh.text)
        return replace(whole, options=options, tolerance=STAGE_TOLERANCE), whole

    def _plain(self, known_ns: int | None) -> Divided | None:
        """What a step in one stage takes, in as few microbatches as are thought to fit, if that is
        less than what is known. More of them never take less time."""
        for count in numbers_of_microbatches(self.asked, 1):
            divided = self._divided(PipelineShape(1, count, "1f1b"), known_ns)
            if divided is None or divided.is_within:
                return divided
        return None

    def _thought_ns(self) -> int | None:
        """What shapes that are thought to fit in memory take at the least."""
        return min(map(_step_ns, self._within()), default=None)

    def _known_ns(self) -> int | None:
        """The same, or what there is a plan of."""
        best = self.tried.best
        known = (self._thought_ns(), None if best is None else best.estimates.step_ns)
        return min((ns for ns in known if ns is not None), default=None)

    def best(self) -> list[tuple[PipelineShape, Divided]]:
        """Best first. One stage is weighed after the first of them, where it is open."""
        ranks = numbers_of_ranks(self.asked)
        start = self._start(ranks)

        def improves(k: int) -> bool:
            found = self._improves_on(ranks[k])
            if k == start and self.is_open:
                self._weigh_plain()
            return found

        climb(len(ranks), start, improves)
        if not ranks and self.is_open:
            self._weigh_plain()
        if self._within():
            best, _ = min(self._within(), key=_step_ns)
            counts = numbers_of_microbatches(self.asked, best.ranks)
            shapes = [shaped(self.asked.options, best.ranks, count) for count in counts]
            climb(len(shapes), shapes.index(best), lambda k: self._improves(shapes[k]))
        if self.found:
            best, divided = min(self._within() or self.found, key=_step_ns)
            for shape in other_orders(self.asked.options, best, divided.waits):
                self._consider(shape, divided.mesh.text)
        return sorted(self.found, key=_step_ns)

    def _start(self, ranks: Sequence[int]) -> int:
        """The number of ranks that is considered first: a node's devices each, if there may be."""
        nodes = self.asked.cluster.levels[0].size
        return ranks.index(nodes) if nodes in ranks else len(ranks) // 2

    def _improves_on(self, ranks: int) -> bool:
        """Whether a pipeline on so many ranks is better than those before, if any fit in memory, or
        there is none at all: in some microbatches for each, in as many more as it takes to fit, or
        in fewer where more cannot be."""
        before, counts = self._thought_ns(), numbers_of_microbatches(self.asked, ranks)
        start = next((k for k, n in enumerate(counts) if n >= _TURNS * ranks), len(counts) - 1)
        is_possible = False
        for count in (*counts[start:], *reversed(counts[:start])):
            shape = shaped(self.asked.options, ranks, count)
            if count < counts[start] and is_possible:
                break
            divided = self._consider(shape)
            is_possible |= shape not in self._failed
            if shape not in self._failed and divided is None:
                return False
            if divided is not None and divided.is_within:
                break
        return before is None or not is_possible or self._thought_ns() != before

    def _improves(self, shape: PipelineShape) -> bool:
        """Whether a shape is better than those before, or is one of them, or cannot be."""
        before = self._known_ns()
        if not any(shape == other for other, _ in self.found):
            self._consider(shape)
            return shape in self._failed or self._known_ns() != before
        return True

    def left(self) -> Iterator[tuple[PipelineShape, Divided]]:
        """Those that are not among the best, few microbatches first: of each number of ranks
        until a plan of one is better than what there is."""
        tried = self.tried
        done = {shape for shape, _ in self.found}
        for ranks in numbers_of_ranks(self.asked):
            before = tried.best
            for count in numbers_of_microbatches(self.asked, ranks):
                shape = shaped(self.asked.options, ranks, count)
                if shape in done or tried.best is not before:
                    continue
                divided = self._divided(shape, None)
                if divided is not None:
                    yield shape, divided

    def _within(self) -> list[tuple[PipelineShape, Divided]]:
        """The shapes that are thought to fit in memory."""
        return [each for each in self.found if each[1].is_within]

    def _consider(self, shape: PipelineShape, mesh: str = "") -> Divided | None:
        """The best stages of a shape, on one `mesh` if it is given, if they are thought to take
        less than what is known."""
        divided = self._divided(shape, self._known_ns(), mesh)
        if divided is not None:
            self.found.append((shape, divided))
        return divided

    def _divided(
        self, shape: PipelineShape, known_ns: int | None, mesh: str = ""
    ) -> Divided | None:
        """The best stages of a shape, if there are any that are better than what is known."""
        say = self.tried.say
        say(f"{shape} ({shape.schedule})")
        try:
            divided = self.ways.divided(shape.table, known_ns, mesh)
        except (InfeasibleError, StageError, UnsuitedMeshError) as error:
            self.tried.fail(error)
            self._failed.add(shape)
            return None
        if divided is not None:
            say(f"{shape}: about {format_ns(divided.step_ns)}")
        return divided


def _step_ns(found: tuple[PipelineShape, Divided]) -> int:
    return found[1].step_ns


class _Tried:
    """The best plan so far, and why there was none where there was none."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.best: Plan | None = None
        self.failure: Exception | None = None

    def offer(self, make: Callable[_P, Plan], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        """Takes a plan, if there is one, and says whether there is."""
        try:
            plan = make(*args, **kwargs)
        except (InfeasibleError, StageError) as error:
            self.fail(error)
            return False
        step_ns = plan.estimates.step_ns
        self.say(f"step {format_ns(step_ns)}")
        if self.best is None or step_ns < self.best.estimates.step_ns:
            self.best = plan
        return True

    def offer_any(
        self, make: Callable[[Asked, Say], Plan], asked: Sequence[Asked], say: Say
    ) -> bool:
        """Takes the plan of the first of those `asked` for of which there is one."""
        return any(self.offer(make, each, say) for each in asked)

    def is_enough(self, number: int, step_ns: int) -> bool:
        """Whether there is a plan, and after so many others one that is thought to take `step_ns`
        is not worth its time: plans take longer than they are thought to."""
        if self.best is None:
            return False
        return number >= _PLANNED or step_ns >= self.best.estimates.step_ns

    def fail(self, error: Exception) -> None:
        """Why there is no such plan."""
        self.say(str(error))
        self.failure = self.failure or error

    def found(self) -> Plan:
        """The best plan; the first failure if there is none."""
        if self.best is None:
            raise self.failure or StageError("the devices are not shared by as many stages")
        return self.best


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
        options = replace(
            options, mesh=self.divided.mesh.text, microbatches=self.shape.microbatches
        )
        asked = replace(self.asked, cluster=self.cluster, options=options)
        found = plan_stages(asked, graphs, table, self.divided.narrowed, self.say)
        layouts = [
            parse_layout(graph, each.structure) for graph, each in zip(graphs, found, strict=True)
        ]
        sends = delays(layouts, line_of(self.asked.cluster, ranks) if ranks > 1 else None)
        tied = tied_in(layouts)
        shared = shared_at_end(self.asked.graph, tied, table.ranks, self.asked.cluster)
        estimates = add_up(table, [each.estimates for each in found], sends, shared)
        return self._written(["", *(module for module, _ in starts)], found, estimates)

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
            schedule=shape.stored,
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
                imposed=(*told.describe_imposed(), *imposed_on(asked.options)),
            ),
        )
