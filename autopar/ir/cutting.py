"""Where to cut a chain of segments into stages: figures, and what is to be made least of.

A step of a pipeline takes about as long as one microbatch through all stages, and the busiest rank
with all others, and what a rank does once: `(m - 1/v) T + S/v + O`, of m microbatches and v stages
per rank, where T is what the busiest rank takes for a microbatch, S what all stages take together,
and O the most that a rank takes for what is done once. That is exact of GPipe, 1F1B and interleaved
1F1B where stages are equal and sends take no time.

Where backward comes in two parts, the second fills what ranks wait. Then a rank that begins after
the forwards F of the stages before its own is done after `F + m T + O`, of its own T and O, at the
earliest, in whatever order: the longest of these is what the step takes at the least. The cuts with
the shortest step by the first formula are still the better ones where steps are played.

Ranks may differ in their meshes: a segment takes what it takes on that of its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One way to do a segment: nanoseconds of a microbatch, forward and backward; bytes that are
    there all the time; bytes that a microbatch holds between its forward and its backward;
    nanoseconds of what is done once in a step, beyond that; and those of the forward alone. It is
    that of a rank whose mesh is number `mesh` of those there are."""

    time_ns: int
    static_bytes: int
    saved_bytes: int
    once_ns: int = 0
    forward_ns: int = 0
    mesh: int = 0


@dataclass(frozen=True, slots=True)
class RankMeshes:
    """The meshes that ranks of a pipeline may have, of so many devices each: all together have
    `devices`, or each rank has the mesh that is `given`. Segments of sorts that are `alike`, as
    those are that share a weight, are all on one mesh."""

    sizes: tuple[int, ...]
    devices: int
    given: tuple[int, ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CutProblem:
    """`counts` segments of each sort follow one another, and have the `plans` of the sort to be
    done. Stage k is on rank `ranks[k]`, and holds `in_flight[k]` microbatches at most; what stages
    of a rank hold is within `limit_bytes` together. Where backward comes in two parts, it
    `is_split`. Ranks have the one mesh there is, or each one of `meshes`."""

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
        """How many stages a rank has at most."""
        return max(self.ranks.count(rank) for rank in self.ranks)

    def sizes(self, starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """How many segments of each sort each stage has whose segments begin with these, but for
        the first stage."""
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
    """How many segments of each sort each stage does in each way, `taken[stage][sort][way]`. The
    `least_ns` of no cuts is below `bound_ns`."""

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
        """What is made least of."""
        busy, once, _ = self._times(problem)
        repeats = problem.microbatches - 1 / problem.chunks
        microbatches_ns = repeats * max(busy.values()) + sum(busy.values()) / problem.chunks
        return microbatches_ns + max(once.values())

    def least_ns(self, problem: CutProblem) -> float:
        """What bounds speak of: `step_ns`, or what a step takes at the least whose backward comes
        in two parts."""
        if not problem.is_split:
            return self.step_ns(problem)
        busy, once, before = self._times(problem)
        return max(before[r] + problem.microbatches * busy[r] + once[r] for r in busy)

    def _times(
        self, problem: CutProblem
    ) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """Of each rank: what it takes for a microbatch, and once; and what the forwards take before
        its own."""
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
