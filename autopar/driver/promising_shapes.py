"""Which shapes of pipelines, and whether one stage, may have the shortest step, by what segments of
the model take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from autopar.compile import Say
from autopar.cost_model.turn_times import launched_ns
from autopar.driver.climbing import climb
from autopar.driver.offers import Offers
from autopar.driver.pipeline_shapes import (
    PipelineShape,
    mixed_shapes,
    numbers_of_microbatches,
    numbers_of_ranks,
    other_orders,
    shaped,
)
from autopar.driver.search import meshes_of, planned, survey
from autopar.driver.segment_division import Divided
from autopar.driver.segment_ways import SegmentWays
from autopar.driver.stage_plans import STAGE_TOLERANCE
from autopar.errors import InfeasibleError, StageError, UnsuitedMeshError
from autopar.ir.units import format_ns
from autopar.plans.plan import Plan
from autopar.plans.request import Asked

_TURNS = 4
"""In how many microbatches for each rank pipelines are considered first: with fewer ranks wait for
a fifth of the step or more, and hold more."""

_FINE = 0.1
"""In microbatches that are so small that launching them alone takes longer than this part of a step
in one stage, pipelines are not considered first."""

_COARSER = 1.5
"""By how much less ranks are thought to work in fewer microbatches, where launches count and adding
up gradients: in four stages 8 layers of Llama, 128 wide, keep a CPU busy for 402 ms in 16 of them,
for 255 in 8 and for 178 in 4."""

_FEW = 5
"""How many meshes are all planned in one stage, whatever it takes: 32 devices have no more."""

_FAR = 1.2
"""How many times as long as it was thought to take a step takes of which that was no knowledge."""

NEAR = 1.03
"""The most that what is planned is thought to take, in terms of the best that fits: what segments
take is known to some parts in a hundred."""


class Promising:
    """The shapes that may have the shortest step, by what their segments take. What fails is told
    to `tried`."""

    def __init__(
        self, asked: Asked, ways: SegmentWays, tried: Offers, *, only_several: bool = False
    ) -> None:
        self.asked, self.ways, self.tried = asked, ways, tried
        self.found: list[tuple[PipelineShape, Divided]] = []
        is_open = asked.options.is_number_of_stages_open and not only_several
        self.is_open = is_open and tried.best is None
        """Whether one stage is to be planned."""
        self.plain: Divided | None = None
        """What a step in one stage is thought to be, where that is open and known."""
        self.has_plain: bool | None = None
        """Whether there is a plan in one stage; None where it was not looked for."""
        self._failed: set[PipelineShape] = set()
        """Those that cannot be, or not in that much memory."""

    @property
    def in_one(self) -> Asked:
        """What is asked, of one stage."""
        return replace(self.asked, options=replace(self.asked.options, stages=1))

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
        self.has_plain = self.tried.offer_any(_best_in_one, self._plain_asked(), self.tried.say)

    def _weigh_plain(self, thought_ns: int | None) -> None:
        """Plans one stage, where that may be as good as what is thought to take so long: what it
        takes is then known, and shapes that take longer are left out early."""
        known_ns = None if thought_ns is None else int(NEAR * thought_ns)
        self.plain = self.plain or self._plain(known_ns)
        if self.plain is not None and (known_ns is None or self.plain.step_ns <= known_ns):
            self.plan_plain()

    def _plain_asked(self) -> Sequence[Asked]:
        """One stage, on any mesh: where there are many and memory binds, so that each takes long,
        first on the best by what segments take."""
        whole = self.in_one
        has_many = len(meshes_of(whole.cluster, whole.options)) > _FEW
        if self.plain is None or not self.plain.is_tight or not has_many:
            return (whole,)
        options = replace(whole.options, mesh=self.plain.mesh_text)
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
        """Best first. One stage is weighed beside the first of them, where it is open: before that
        is planned within the memory there is, if one stage may be better than it is without."""
        ranks = numbers_of_ranks(self.asked)
        start = self._start(ranks)

        def improves(k: int) -> bool:
            is_open = k == start and self.is_open
            hoped_ns = self._hoped_ns(ranks[k]) if is_open else None
            if hoped_ns is not None:
                self._weigh_plain(hoped_ns)
            found = self._improves_on(ranks[k])
            if is_open and self.has_plain is None:
                self._weigh_plain(self._thought_ns())
            return found

        climb(len(ranks), start, improves)
        if not ranks and self.is_open:
            self._weigh_plain(None)
        for best, _ in self._best_of_ranks(self._within(), _COARSER):
            self._climb_from(best)
        self._mix()
        for best, divided in self._best_of_ranks(self._within() or self.found):
            for shape in other_orders(self.asked.options, best, divided.waits):
                self._consider(shape, divided.mesh_text)
        return sorted(self.found, key=_step_ns)

    def _climb_from(self, best: PipelineShape) -> None:
        """To the best number of microbatches on as many ranks."""
        counts = numbers_of_microbatches(self.asked, best.ranks)
        shapes = [shaped(self.asked, best.ranks, count) for count in counts]
        climb(len(shapes), shapes.index(best), lambda k: self._improves(shapes[k]))

    def _best_of_ranks(
        self, found: Sequence[tuple[PipelineShape, Divided]], less: float = 1.0
    ) -> Iterator[tuple[PipelineShape, Divided]]:
        """Of each number of ranks the best of those `found`, if it is the best that is known by
        then, or would be better than that did its busiest rank not wait, and work `less` by such a
        factor: in other microbatches or another order it waits less."""
        of_ranks: dict[int, tuple[PipelineShape, Divided]] = {}
        for each in sorted(found, key=_step_ns):
            of_ranks.setdefault(each[0].ranks, each)
        for each in of_ranks.values():
            step_ns, known_ns = each[1].step_ns, self._known_ns()
            working_ns = (1 - each[1].waits) * step_ns / less
            if known_ns is None or step_ns <= known_ns or working_ns < known_ns:
                yield each

    def _start(self, ranks: Sequence[int]) -> int:
        """The number of ranks that is considered first: a node's devices each, if there may be."""
        nodes = self.asked.cluster.levels[0].size
        return ranks.index(nodes) if nodes in ranks else len(ranks) // 2

    def _counts(self, ranks: int) -> tuple[Sequence[int], int]:
        """The numbers of microbatches on so many ranks, and the place of the first to consider."""
        counts = numbers_of_microbatches(self.asked, ranks)
        most = self._most_launched(ranks)
        enough = (k for k, count in enumerate(counts) if count >= _TURNS * ranks)
        first = next(enough, len(counts) - 1)
        while first and most is not None and counts[first] > most:
            first -= 1
        return counts, first

    def _most_launched(self, ranks: int) -> float | None:
        """In how many microbatches ranks launch what they do in a small part of the step in one
        stage that there is a plan of."""
        best, device = self.tried.best, self.asked.cluster.device
        if best is None or best.structure.is_pipeline:
            return None
        once_ns = launched_ns(best.estimates.stages[0], device) / best.structure.microbatches
        return _FINE * best.estimates.step_ns * ranks / max(1.0, once_ns)

    def _hoped_ns(self, ranks: int) -> int | None:
        """What a pipeline on so many ranks may take at the least, if that is known soon."""
        counts, start = self._counts(ranks)
        shape = shaped(self.asked, ranks, counts[start])
        if shape.sizes:
            return None
        try:
            return self.ways.hoped_ns(shape.table)
        except (InfeasibleError, StageError, UnsuitedMeshError):
            return None

    def _improves_on(self, ranks: int) -> bool:
        """Whether a pipeline on so many ranks is better than those before, if any fit in memory, or
        there is none at all: in some microbatches for each, in as many more as it takes to fit, or
        in fewer where more cannot be."""
        before, (counts, start) = self._thought_ns(), self._counts(ranks)
        is_possible = False
        for count in (*counts[start:], *reversed(counts[:start])):
            shape = shaped(self.asked, ranks, count)
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

    def _mix(self) -> None:
        """Considers ranks that differ in how many devices they have beside the best that do not,
        if they would be better than what is known were none of them idle."""
        best, divided = min(self._within(), key=_step_ns, default=(None, None))
        if best is None or divided is None:
            return
        least_ns, known_ns = (1 - divided.idle) * divided.step_ns, self._known_ns()
        if known_ns is not None and least_ns >= known_ns:
            return
        mixed = mixed_shapes(self.asked, best, divided.idle)
        start = next((k for k, s in enumerate(mixed) if s.ranks >= best.ranks), len(mixed) - 1)
        climb(len(mixed), start, partial(self._improves_mixed, mixed))

    def _improves_mixed(self, mixed: Sequence[PipelineShape], place: int) -> bool:
        """Whether one of these shapes is better than what is known."""
        before = self._known_ns()
        self._consider(mixed[place])
        return self._known_ns() != before

    def left(self) -> Iterator[tuple[PipelineShape, Divided]]:
        """Those that are not among the best, few microbatches first: of each number of ranks
        until a plan of one is better than what there is."""
        tried = self.tried
        done = {shape for shape, _ in self.found}
        for ranks in numbers_of_ranks(self.asked):
            before = tried.best
            for count in numbers_of_microbatches(self.asked, ranks):
                shape = shaped(self.asked, ranks, count)
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
            if shape.sizes:
                divided = self.ways.mixed(shape.table, shape.sizes)
            else:
                divided = self.ways.divided(shape.table, known_ns, mesh)
        except (InfeasibleError, StageError, UnsuitedMeshError) as error:
            self.tried.fail(error)
            self._failed.add(shape)
            return None
        if divided is not None:
            say(f"{shape}: about {format_ns(divided.step_ns)}")
        return divided


def _best_in_one(asked: Asked, say: Say) -> Plan:
    """The best plan in one stage, on a mesh of at most two axes where none is named, as stages are.
    Errors are not explained: there may be one in several."""
    return planned(survey(asked, say, finer=False))


def _step_ns(found: tuple[PipelineShape, Divided]) -> int:
    return found[1].step_ns
