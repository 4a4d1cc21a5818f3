"""Which shapes of pipelines may have the shortest step, by what segments of the model take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from autopar.cost_model.turn_times import launched_ns
from autopar.driver.finding import Finding, Other
from autopar.driver.incumbent import REFUSALS, CandidateSearch, climb
from autopar.driver.pipeline_shapes import (
    PipelineShape,
    mixed_shapes,
    numbers_of_microbatches,
    numbers_of_ranks,
    other_orders,
    shaped,
)
from autopar.driver.segment_division import Divided
from autopar.driver.segment_ways import SegmentWays
from autopar.ir.units import format_ns
from autopar.plans.fitting import Beaten
from autopar.plans.request import Asked


class Promising:
    """The shapes that may have the shortest step, by what their segments take. What fails is told
    to `tried`, whose incumbent is to be beaten."""

    def __init__(self, asked: Asked, ways: SegmentWays, tried: CandidateSearch[Finding]) -> None:
        self.asked, self.ways, self.tried = asked, ways, tried
        self.policy = asked.options.policy
        self.found: list[tuple[PipelineShape, Divided]] = []
        self.planned: dict[PipelineShape, Finding] = {}
        self._failed: set[PipelineShape] = set()
        """Those that cannot be, or not in that much memory."""
        self._beaten: dict[PipelineShape, int] = {}
        """What those that were cut off take at the least."""

    def _estimated_ns(self) -> int | None:
        """What shapes that are estimated to fit in memory take at the least."""
        return min(map(_step_ns, self._within()), default=None)

    def _known_ns(self) -> int | None:
        """The same, or what there is a plan of."""
        best = self.tried.incumbent
        known = (self._estimated_ns(), None if best is None else best.step_ns)
        return min((ns for ns in known if ns is not None), default=None)

    def best(self) -> list[tuple[PipelineShape, Divided]]:
        """Best first."""
        ranks = numbers_of_ranks(self.asked)
        climb(len(ranks), self._start(ranks), lambda k: self._improves_on(ranks[k]))
        for best, _ in self._best_of_ranks(self._within(), self.policy.fewer_turns_gain):
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
        enough = (
            k for k, count in enumerate(counts) if count >= self.policy.turns_per_rank * ranks
        )
        first = next(enough, len(counts) - 1)
        while first and most is not None and counts[first] > most:
            first -= 1
        return counts, first

    def _most_launched(self, ranks: int) -> float | None:
        """In how many microbatches ranks launch what they do in a small part of the step in one
        stage that there is a plan of."""
        best, device = self.tried.incumbent, self.asked.cluster.device
        if best is None or len(best.stages) > 1:
            return None
        once_ns = launched_ns(best.estimates.stages[0], device) / best.microbatches
        return self.policy.launched_most * best.step_ns * ranks / max(1.0, once_ns)

    def _improves_on(self, ranks: int) -> bool:
        """Whether a pipeline on so many ranks is better than those before, if any fit in memory, or
        there is none at all: in some microbatches for each, in as many more as it takes to fit, or
        in fewer where more cannot be."""
        before, (counts, start) = self._estimated_ns(), self._counts(ranks)
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
        return before is None or not is_possible or self._estimated_ns() != before

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
            before = tried.incumbent
            for count in numbers_of_microbatches(self.asked, ranks):
                shape = shaped(self.asked, ranks, count)
                if shape in done or tried.incumbent is not before:
                    continue
                divided = self._divided(shape, None)
                if divided is not None:
                    yield shape, divided

    def _within(self) -> list[tuple[PipelineShape, Divided]]:
        """The shapes that are estimated to fit in memory."""
        return [each for each in self.found if each[1].is_within]

    def _consider(self, shape: PipelineShape, mesh: str = "") -> Divided | None:
        """The best stages of a shape, on one `mesh` if it is given, if they are estimated to
        take less than what is known."""
        divided = self._divided(shape, self._known_ns(), mesh)
        if divided is not None:
            self.found.append((shape, divided))
        return divided

    def _divided(
        self, shape: PipelineShape, known_ns: int | None, mesh: str = ""
    ) -> Divided | None:
        """The best stages of a shape, if there are any that are better than what is known."""
        trail = self.tried.trail
        trail(shape.name)
        try:
            if shape.sizes:
                divided = self.ways.mixed(shape.table, shape.sizes)
            else:
                divided = self.ways.divided(shape.table, known_ns, mesh)
        except Beaten as beaten:
            self._beaten[shape] = beaten.bound
            trail(f"{shape}: {beaten}")
            trail.note(shape.name, "not better", beaten.bound)
            return None
        except REFUSALS as error:
            self.tried.refuse(error, name=shape.name)
            self._failed.add(shape)
            return None
        trail(f"{shape}: about {format_ns(divided.step_ns)}")
        trail.note(shape.name, "estimated", divided.step_ns)
        return divided

    def others(self, best: Finding) -> tuple[Other, ...]:
        """What is known of shapes with other meshes than the `best` plan has."""
        listed = [
            Other(shape.name, divided.bound_ns, self.planned.get(shape))
            for shape, divided in self.found
            if tuple(divided.meshes[k].text for k in shape.table.ranks.values()) != best.meshes
        ]
        return (*listed, *(Other(shape.name, ns) for shape, ns in self._beaten.items()))


def _step_ns(found: tuple[PipelineShape, Divided]) -> int:
    return found[1].step_ns
