"""Where to cut a chain of segments into stages: the figures of the problem, and its objective.

A step of a pipeline takes about `(m - 1/v) T + S/v + O`, with m microbatches and v stages per rank.
T is the time of the busiest rank for a microbatch, S the time of all stages together for one, and O
the longest time of a rank for what is done once in a step. This is exact for GPipe, 1F1B and
interleaved 1F1B where stages are equal and sends take no time.

Where backward comes in two parts, the second fills the idle time of ranks. Let a rank begin after
the forwards F of the stages before its own, with its own T and O. It is done after `F + m T + O` at
the earliest, in whatever order, and the longest of these is a lower bound of the step. The cuts
with the shortest step by the first formula are still the better ones where steps are simulated.

Ranks may differ in their meshes: the time of a segment is that on the mesh of its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """A plan of one segment, for a rank with mesh number `mesh`.

    `time_ns` is that of a microbatch, forward and backward, of which `forward_ns` is the forward.
    `once_ns` is spent once in a step, beyond that. `static_bytes` are held all the time,
    `saved_bytes` per microbatch between its forward and its backward."""

    time_ns: int
    static_bytes: int
    saved_bytes: int
    once_ns: int = 0
    forward_ns: int = 0
    mesh: int = 0


@dataclass(frozen=True, slots=True)
class RankMeshes:
    """The meshes that ranks of a pipeline may have, `sizes[k]` devices in mesh k. All ranks
    together have `devices`, or each rank has the mesh that is `given`. Segment kinds that are
    `alike`, such as those that share a weight, are all on one mesh."""

    sizes: tuple[int, ...]
    devices: int
    given: tuple[int, ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CutProblem:
    """`counts[k]` segments of kind k follow one another, and may have the segment plans `plans[k]`.
    Stage k is on rank `ranks[k]`, and holds `in_flight[k]` microbatches at most. All stages of a
    rank together hold at most `limit_bytes`. The problem `is_split` where backward comes in two
    parts. All ranks have one mesh, or each has one of `meshes`."""

    counts: tuple[int, ...]
    plans: tuple[tuple[SegmentPlan, ...], ...]
    ranks: tuple[int, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    limit_bytes: int
    is_split: bool = False
    meshes: RankMeshes | None = None

    @property
    def chunks(self) -> int:
        """The number of stages of the rank that has most."""
        return max(self.ranks.count(rank) for rank in self.ranks)

    def sizes(self, starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The number of segments per stage and kind, where `starts` are the first segments of all
        stages but the first."""
        ends = [*accumulate(self.counts)]
        first = [end - count for end, count in zip(ends, self.counts, strict=True)]
        return tuple(
            tuple(
                max(0, min(stop, end) - max(start, at)) for at, end in zip(first, ends, strict=True)
            )
            for start, stop in pairwise((0, *starts, ends[-1]))
        )


@dataclass(frozen=True, slots=True)
class Division:
    """The cuts: `taken[stage][kind][plan]` segments of a kind have a segment plan in a stage. No
    cuts have a `least_ns` below `bound_ns`."""

    taken: tuple[tuple[tuple[float, ...], ...], ...]
    bound_ns: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The segment at which each stage but the first begins."""
        sizes = [round(sum(map(sum, stage))) for stage in self.taken]
        return tuple(sum(sizes[:k]) for k in range(1, len(sizes)))

    def meshes(self, problem: CutProblem) -> tuple[int, ...]:
        """The mesh of each rank, by its number."""
        meshes = dict.fromkeys(sorted(problem.ranks), 0)
        for rank, stage in zip(problem.ranks, self.taken, strict=True):
            for numbers, plans in zip(stage, problem.plans, strict=True):
                for number, plan in zip(numbers, plans, strict=True):
                    meshes[rank] = plan.mesh if number else meshes[rank]
        return tuple(meshes.values())

    def step_ns(self, problem: CutProblem) -> float:
        """The objective, which is minimised."""
        busy, once, _ = self._times(problem)
        repeats = problem.microbatches - 1 / problem.chunks
        microbatches_ns = repeats * max(busy.values()) + sum(busy.values()) / problem.chunks
        return microbatches_ns + max(once.values())

    def least_ns(self, problem: CutProblem) -> float:
        """What bounds are bounds of: `step_ns`, or, where backward comes in two parts, the least
        that a step takes."""
        if not problem.is_split:
            return self.step_ns(problem)
        busy, once, before = self._times(problem)
        return max(before[r] + problem.microbatches * busy[r] + once[r] for r in busy)

    def _times(
        self, problem: CutProblem
    ) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """Three times per rank, in ns: for a microbatch, once in a step, and the forwards of all
        stages before the rank's first."""
        busy, once = dict.fromkeys(problem.ranks, 0.0), dict.fromkeys(problem.ranks, 0.0)
        before: dict[int, float] = {}
        forwards = 0.0
        for rank, stage in zip(problem.ranks, self.taken, strict=True):
            before.setdefault(rank, forwards)
            for numbers, plans in zip(stage, problem.plans, strict=True):
                for number, plan in zip(numbers, plans, strict=True):
                    busy[rank] += number * plan.time_ns
                    once[rank] += number * plan.once_ns
                    forwards += number * plan.forward_ns
        return busy, once, before
