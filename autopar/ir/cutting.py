"""Where to cut a chain of segments into stages: figures, and what is to be made least of.

A step of a pipeline takes about as long as one microbatch through all stages, and the busiest rank
with all others: `(m - 1/v) T + S/v`, of m microbatches and v stages per rank, where T is what the
busiest rank takes for a microbatch and S what all stages take together. That is exact of GPipe,
1F1B and interleaved 1F1B where stages are equal and sends take no time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do a segment: nanoseconds of a microbatch, forward and backward; bytes that are
    there all the time; and bytes that a microbatch holds between its forward and its backward."""

    time_ns: int
    static_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class CutProblem:
    """`counts` segments of each sort follow one another, and have the `ways` of the sort to be
    done. Stage k is on rank `ranks[k]`, and holds `in_flight[k]` microbatches at most; what stages
    of a rank hold is within `limit_bytes` together."""

    counts: tuple[int, ...]
    ways: tuple[tuple[Way, ...], ...]
    ranks: tuple[int, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    limit_bytes: int

    @property
    def chunks(self) -> int:
        """How many stages a rank has at most."""
        return max(self.ranks.count(rank) for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Division:
    """How many segments of each sort each stage does in each way, `taken[stage][sort][way]`. No
    cuts are known to take less than `bound_ns`."""

    taken: tuple[tuple[tuple[float, ...], ...], ...]
    bound_ns: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The segment at which each stage but the first begins."""
        sizes = [round(sum(map(sum, stage))) for stage in self.taken]
        return tuple(sum(sizes[:k]) for k in range(1, len(sizes)))

    def step_ns(self, problem: CutProblem) -> float:
        """What is made least of."""
        stage_ns = [
            sum(
                number * way.time_ns
                for numbers, ways in zip(stage, problem.ways, strict=True)
                for number, way in zip(numbers, ways, strict=True)
            )
            for stage in self.taken
        ]
        busy: dict[int, float] = {}
        for rank, taken in zip(problem.ranks, stage_ns, strict=True):
            busy[rank] = busy.get(rank, 0) + taken
        often = problem.microbatches - 1 / problem.chunks
        return often * max(busy.values()) + sum(stage_ns) / problem.chunks
