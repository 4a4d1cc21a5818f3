"""Which shapes of pipelines may have the shortest step, by what segments of the model take."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import REFUSALS, CandidateSearch, line_search
from autopar.driver.search.pipeline_shapes import PipelineShape, PipelineShapes, other_orders
from autopar.driver.search.segment_division import Divided
from autopar.ir.units import format_ns
from autopar.plans.memory_refinement import Beaten

_Place = TypeVar("_Place", int, PipelineShape)


class PipelineCandidates:
    """The shapes that may have the shortest step, by what their segments take: first those that
    are `to_divide` are divided into stages, `with promising.dividing(shape)`, and of these some are
    `to_plan`. What fails is told to `tried`, whose incumbent is to be beaten."""

    def __init__(self, shapes: PipelineShapes, tried: CandidateSearch[Finding]) -> None:
        self.shapes, self.tried = shapes, tried
        self.policy = shapes.options.policy
        self.estimated: list[tuple[PipelineShape, Divided]] = []
        self.planned: dict[PipelineShape, Finding] = {}
        self._failed: set[PipelineShape] = set()
        """Those that cannot be, or not in that much memory."""
        self._beaten: dict[PipelineShape, int] = {}
        """What those that were cut off take at the least."""
        self._is_improved = False
        """Whether what was considered last is better than what was known."""

    def _estimated_ns(self) -> int | None:
        """What shapes that are estimated to fit in memory take at the least."""
        return min(map(_step_ns, self._within()), default=None)

    def known_ns(self) -> int | None:
        """The same, or what there is a plan of."""
        best = self.tried.incumbent
        known = (self._estimated_ns(), None if best is None else best.step_ns)
        return min((ns for ns in known if ns is not None), default=None)

    @contextmanager
    def dividing(self, shape: PipelineShape) -> Generator[None]:
        """Within it, the best stages of a shape are `estimate`d, if there are any that are better
        than what is known; what is raised says why there are not."""
        trail = self.tried.trail
        trail(shape.name)
        try:
            yield
        except Beaten as beaten:
            self._beaten[shape] = beaten.bound
            trail(f"{shape}: {beaten}")
            trail.note(shape.name, "not better", beaten.bound)
        except REFUSALS as error:
            self.tried.refuse(error, name=shape.name)
            self._failed.add(shape)

    def estimate(self, shape: PipelineShape, stages: Divided) -> None:
        """Takes the best stages of a shape."""
        self.tried.trail(f"{shape}: about {format_ns(stages.step_ns)}")
        self.tried.trail.note(shape.name, "estimated", stages.step_ns)
        self.estimated.append((shape, stages))

    def to_divide(self) -> Iterator[tuple[PipelineShape, str]]:
        """The shapes that are to be divided one after the other, each on one mesh if it is
        given."""
        ranks = self.shapes.numbers_of_ranks()
        start = self.shapes.start(ranks)
        for count in self._climbed(ranks, start, lambda n: f"pipelines on {n} ranks"):
            yield from self._on_ranks(count)
        for best, _ in self._best_of_ranks(self._within(), self.policy.fewer_microbatches_gain):
            yield from self._around(best)
        yield from self._mixed()
        for best, divided in self._best_of_ranks(self._within() or self.estimated):
            for shape in other_orders(self.shapes.options, best, divided.waits):
                yield shape, divided.mesh_text

    def to_plan(self) -> Iterator[tuple[PipelineShape, Divided | None]]:
        """Those that are to be planned, one after the other: the best, and where none of these has
        a plan, as stages hold more than their segments do, all others. Those without stages are to
        be divided."""
        yield from self._the_best()
        if self.tried.incumbent is None:
            for shape in self._left():
                number = len(self.estimated)
                yield shape, None
                yield from self.estimated[number:]

    def take(self, shape: PipelineShape, plan: Finding | None) -> None:
        """What became of one."""
        if plan is not None:
            self.planned[shape] = plan

    def result(self, known: Finding | None) -> Finding:
        """The shortest step, and what is known of the others; `known` if none is shorter."""
        found = self.tried.result()
        return found if found is known else replace(found, others=self.others(found))

    def _the_best(self) -> Iterator[tuple[PipelineShape, Divided]]:
        """Shapes that may be the best. What one takes beyond its estimate is taken to hold for all
        of as many ranks, whose stages have the same devices."""
        left = sorted(self.estimated, key=_step_ns)
        least: float | None = None
        longer: dict[int, float] = {}

        def hoped_ns(each: tuple[PipelineShape, Divided]) -> float:
            return longer.get(each[0].ranks, 1.0) * each[1].step_ns

        for number in range(len(left)):
            first = min(left, key=hoped_ns)
            why = self._unworthy(number, hoped_ns(first), least)
            if why:
                self.tried.trail.skip(f"other pipelines ({len(left)})", why)
                return
            left.remove(first)
            yield first
            shape, divided = first
            if shape in self.planned and self.tried.incumbent is not None:
                longer[shape.ranks] = self.planned[shape].step_ns / divided.step_ns
                # Others may take less than that, beyond their estimates.
                least = least or max(divided.step_ns, self.tried.incumbent.step_ns)

    def _unworthy(self, number: int, step_ns: float, least: float | None) -> str:
        """Why, after so many others, a pipeline that is expected to take `step_ns` is not planned,
        if it is not: plans take longer than they are estimated to."""
        policy, best = self.policy, self.tried.incumbent
        if least is not None and step_ns > policy.estimate_near * least:
            return f"estimate_near {policy.estimate_near:g}"
        if best is None:
            return ""
        if number >= policy.pipelines_planned:
            return f"pipelines_planned {policy.pipelines_planned}"
        return "longer than the best plan" if step_ns >= best.step_ns else ""

    def _climbed(
        self, line: Sequence[_Place], start: int, name: Callable[[_Place], str]
    ) -> Iterator[_Place]:
        """`line_search`; those that are not tried are told as skipped, by `name`."""
        tried = list[_Place]()
        for each in line_search(line, start, lambda: self._is_improved):
            tried.append(each)
            yield each
        known = {shape for shape, _ in self.estimated} | self._failed | self._beaten.keys()
        for each in line:
            if each not in tried and each not in known:
                self.tried.trail.skip(name(each), "those beside it are no better")

    def _around(self, best: PipelineShape) -> Iterator[tuple[PipelineShape, str]]:
        """Other numbers of microbatches on as many ranks."""
        shapes = self.shapes.on_ranks(best.ranks)
        for shape in self._climbed(shapes, shapes.index(best), _name):
            before, is_known = self.known_ns(), any(shape == other for other, _ in self.estimated)
            if not is_known:
                yield shape, ""
            self._is_improved = is_known or shape in self._failed or self.known_ns() != before

    def _best_of_ranks(
        self, shapes: Sequence[tuple[PipelineShape, Divided]], less: float = 1.0
    ) -> Iterator[tuple[PipelineShape, Divided]]:
        """Of each number of ranks the best of those `shapes`, if it is the best that is known by
        then, or would be better than that did its busiest rank not wait, and work `less` by such a
        factor: in other microbatches or another order it waits less."""
        of_ranks: dict[int, tuple[PipelineShape, Divided]] = {}
        for each in sorted(shapes, key=_step_ns):
            of_ranks.setdefault(each[0].ranks, each)
        for each in of_ranks.values():
            step_ns, known_ns = each[1].step_ns, self.known_ns()
            working_ns = (1 - each[1].waits) * step_ns / less
            if known_ns is None or step_ns <= known_ns or working_ns < known_ns:
                yield each

    def _on_ranks(self, ranks: int) -> Iterator[tuple[PipelineShape, str]]:
        """Shapes of so many ranks: in some microbatches for each, in as many more as it takes to
        fit, or in fewer where more cannot be. It is improved on what was before if any fit in
        memory, or there is none at all."""
        before, shapes = self._estimated_ns(), self.shapes.on_ranks(ranks)
        start = self.shapes.first(shapes, self.tried.incumbent)
        is_possible = False
        for shape in (*shapes[start:], *reversed(shapes[:start])):
            if shape.microbatches < shapes[start].microbatches and is_possible:
                break
            number = len(self.estimated)
            yield shape, ""
            is_possible |= shape not in self._failed
            if shape not in self._failed and len(self.estimated) == number:
                self._is_improved = False
                return
            if any(divided.is_within for _, divided in self.estimated[number:]):
                break
        self._is_improved = before is None or not is_possible or self._estimated_ns() != before

    def _mixed(self) -> Iterator[tuple[PipelineShape, str]]:
        """Ranks that differ in how many devices they have beside the best that do not, if they
        would be better than what is known were none of them idle."""
        best, divided = min(self._within(), key=_step_ns, default=(None, None))
        if best is None or divided is None:
            return
        least_ns, known_ns = (1 - divided.idle) * divided.step_ns, self.known_ns()
        if known_ns is not None and least_ns >= known_ns:
            return
        mixed = self.shapes.mixed(best, divided.idle)
        start = next((k for k, s in enumerate(mixed) if s.ranks >= best.ranks), len(mixed) - 1)
        for shape in self._climbed(mixed, start, _name):
            before = self.known_ns()
            yield shape, ""
            self._is_improved = self.known_ns() != before

    def _left(self) -> Iterator[PipelineShape]:
        """Those that are not among the best, few microbatches first: of each number of ranks
        until a plan of one is better than what there is."""
        tried = self.tried
        done = {shape for shape, _ in self.estimated}
        for ranks in self.shapes.numbers_of_ranks():
            before = tried.incumbent
            for shape in self.shapes.on_ranks(ranks):
                if shape not in done and tried.incumbent is before:
                    yield shape

    def _within(self) -> list[tuple[PipelineShape, Divided]]:
        """The shapes that are estimated to fit in memory."""
        return [each for each in self.estimated if each[1].is_within]

    def others(self, best: Finding) -> tuple[Other, ...]:
        """What is known of shapes with other meshes than the `best` plan has."""
        listed = [
            Other(shape.name, divided.bound_ns, self.planned.get(shape))
            for shape, divided in self.estimated
            if tuple(divided.meshes[k].text for k in shape.actions.ranks.values()) != best.meshes
        ]
        return (*listed, *(Other(shape.name, ns) for shape, ns in self._beaten.items()))


def _step_ns(shape: tuple[PipelineShape, Divided]) -> int:
    return shape[1].step_ns


def _name(shape: PipelineShape) -> str:
    """What a shape is called that is not looked at: of its order there may be no table."""
    return f"pipelines on {shape.ranks} ranks in {shape.microbatches} microbatches"
