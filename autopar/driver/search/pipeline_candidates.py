"""The shapes of pipelines that may have the shortest step, by what segments of the model take."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from autopar.driver.search.finding import Finding, Other
from autopar.driver.search.incumbent import REFUSALS, CandidateSearch, Stopped, line_search
from autopar.driver.search.pipeline_shapes import PipelineShape, PipelineShapes, other_orders
from autopar.driver.search.segment_division import Divided
from autopar.ir.units import format_ns
from autopar.plans.memory_refinement import Beaten

_Place = TypeVar("_Place", int, PipelineShape)


class PipelineCandidates:
    """The shapes that may have the shortest step, by what their segments take. Those that are
    `to_divide` are divided into stages first, `with candidates.dividing(shape)`, and some of these
    are `to_plan`. `tried` records failures, and its incumbent is to be beaten."""

    def __init__(self, shapes: PipelineShapes, tried: CandidateSearch[Finding]) -> None:
        self.shapes, self.tried = shapes, tried
        self.policy = shapes.options.policy
        self.estimated: list[tuple[PipelineShape, Divided]] = []
        self.planned: dict[PipelineShape, Finding] = {}
        self._failed: set[PipelineShape] = set()
        """Shapes that have no stages, or none within memory."""
        self._beaten: dict[PipelineShape, int] = {}
        """The least step of each shape that was cut off."""
        self._is_improved = False
        """Whether the last shape is better than what was known."""

    def _estimated_ns(self) -> int | None:
        """The least estimate of shapes that fit in memory."""
        return min(map(_step_ns, self._within()), default=None)

    def known_ns(self) -> int | None:
        """The least estimate, or the step of the incumbent if that is shorter."""
        best = self.tried.incumbent
        known = (self._estimated_ns(), None if best is None else best.step_ns)
        return min((ns for ns in known if ns is not None), default=None)

    @contextmanager
    def dividing(self, shape: PipelineShape) -> Generator[None]:
        """Within it, the caller divides a shape and `estimate`s it, if its best stages are better
        than what is known. An error says why there are none."""
        trail = self.tried.trail
        trail(shape.name)
        try:
            yield
        except Beaten as beaten:
            self._beaten[shape] = beaten.bound
            trail(f"{shape}: {beaten}")
            trail.note(shape.name, "not better", beaten.bound)
        except (Stopped, KeyboardInterrupt) as error:
            if not trail.is_ended_by(error):
                raise
            trail.note(shape.name, "skipped", reason=trail.why)
            self.tried.stopped = Stopped(trail.why)
            self._failed.add(shape)
        except REFUSALS as error:
            self.tried.refuse(error, name=shape.name)
            self._failed.add(shape)

    def estimate(self, shape: PipelineShape, stages: Divided) -> None:
        """Adds the best stages of a shape."""
        self.tried.trail(f"{shape}: about {format_ns(stages.step_ns)}")
        self.tried.trail.note(shape.name, "estimated", stages.step_ns)
        self.estimated.append((shape, stages))

    def to_divide(self) -> Iterator[tuple[PipelineShape, str]]:
        """The shapes to divide, one after the other, each with the mesh to use, if that is
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
        """The shapes to plan, one after the other: the best ones. If none of these has a plan,
        since stages hold more than their segments, all others follow. A shape without stages is to
        be divided."""
        trail, best = self.tried.trail, self.tried.incumbent
        if trail.why:
            worth = [e for e in self.estimated if best is None or _step_ns(e) < best.step_ns]
            if worth:
                trail.skip(f"other pipelines ({len(worth)})", trail.why)
            return
        yield from self._the_best()
        if self.tried.incumbent is None:
            for shape in self._left():
                number = len(self.estimated)
                yield shape, None
                yield from self.estimated[number:]

    def take(self, shape: PipelineShape, plan: Finding | None) -> None:
        """Stores the plan of a shape."""
        if plan is not None:
            self.planned[shape] = plan

    def result(self, known: Finding | None) -> Finding:
        """The shortest step, with what is known of the others; `known` if none is shorter."""
        best = self.tried.result()
        return best if best is known else replace(best, others=self.others(best))

    def _the_best(self) -> Iterator[tuple[PipelineShape, Divided]]:
        """The shapes that may be the best. The error of one estimate is taken to hold for all
        shapes of as many ranks, whose stages have the same devices."""
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
        """Why a pipeline that is expected to take `step_ns` is not planned after `number` others;
        empty if it is. Plans take longer than their estimates."""
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
        """`line_search`; places that are not tried are recorded as skipped, by `name`."""
        tried = list[_Place]()
        for each in line_search(line, start, lambda: self._is_improved):
            tried.append(each)
            yield each
        why = self.tried.trail.why or "those beside it are no better"
        known = {shape for shape, _ in self.estimated} | self._failed | self._beaten.keys()
        for each in line:
            if each not in tried and each not in known:
                self.tried.trail.skip(name(each), why)

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
        """For each number of ranks, the best of `shapes`, if it may be improved. It is the best
        that is known by then, or would be if its busiest rank did not wait, and had `less` times
        less work. It waits less in other microbatches or another order."""
        of_ranks: dict[int, tuple[PipelineShape, Divided]] = {}
        for each in sorted(shapes, key=_step_ns):
            of_ranks.setdefault(each[0].ranks, each)
        for each in of_ranks.values():
            step_ns, known_ns = each[1].step_ns, self.known_ns()
            working_ns = (1 - each[1].waits) * step_ns / less
            if known_ns is None or step_ns <= known_ns or working_ns < known_ns:
                yield each

    def _on_ranks(self, ranks: int) -> Iterator[tuple[PipelineShape, str]]:
        """Shapes of so many ranks. The number of microbatches starts at a usual one for each rank,
        and grows until the stages fit, or shrinks if it cannot grow. The ranks are an improvement
        if a shape fits in memory, or if there is none at all."""
        before, shapes = self._estimated_ns(), self.shapes.on_ranks(ranks)
        start = self.shapes.first(shapes)
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
        """Shapes whose ranks differ in their number of devices, beside the best of equal ranks, if
        they would be better than what is known were none of them idle."""
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
        """The shapes that are not estimated yet, few microbatches first. Those of each number of
        ranks follow until a plan is better than the incumbent."""
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
    """The name of a shape that is skipped: there may be no schedule for it."""
    return f"pipelines on {shape.ranks} ranks in {shape.microbatches} microbatches"
