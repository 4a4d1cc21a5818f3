"""Stages that share devices, planned so that each device holds all of its own stages together, and
its host what they have there.

Nobody knows beforehand how much of a device's memory each of its stages needs. Each stage is
planned at first as if it had all. If that is too much for a device, its stages give up memory until
they fit, in proportion to what each holds beyond its least. A device's share of its host's memory
is divided in the same way, but there the least of a stage is not known. If a stage has no plan
within what is left to it, all stages of a device get equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from autopar.compile import Say
from autopar.errors import InfeasibleError
from autopar.ir.pipeline import PipelineSchedule
from autopar.ir.units import format_bytes
from autopar.plans.memory_refinement import Candidate
from autopar.report.names import stages_text

StageBytes = Sequence[int]
"""Bytes of each stage."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A memory that the stages of a device share, with its name in messages, `called`.

    By rank, it has `limits` in bytes, and `held` says how much the stages hold together. `held_by`
    says how much one stage holds, and `least` its least; None if that is not known.
    """

    called: str
    limits: Sequence[int]
    held: Callable[[Sequence[Candidate]], Sequence[int]]
    held_by: Callable[[Candidate], int]
    least: Callable[[int, Candidate], int] | None
    remedy: str


class DeviceSharing:
    """Rounds in which all stages are planned within their limits of each of the `memories`. The
    caller loops `for limits in sharing`, and calls `take` or `refuse` in each round. Rounds end
    when no rank is over its limits, or after `rounds` (`Policy.sharing_rounds`)."""

    def __init__(
        self, actions: PipelineSchedule, memories: Sequence[SharedMemory], say: Say, rounds: int
    ) -> None:
        self._each = [_Sharing(actions, memory) for memory in memories]
        self._say, self._rounds, self._number = say, rounds, 0
        self.plans: list[Candidate] = []
        """The plans of all stages, once they fit."""

    def __iter__(self) -> Iterator[Sequence[StageBytes]]:
        """The limits of each stage, by memory."""
        while not self.plans:
            yield [each.own for each in self._each]
            self._number += 1

    @property
    def _is_last(self) -> bool:
        return self._number == self._rounds - 1

    def refuse(self, error: InfeasibleError) -> None:
        """There are no plans in a round. Raises `error` if nothing else is left to try."""
        if self._is_last or not any(each.shares_evenly() for each in self._each):
            raise error
        self._say(f"{error}; with as much for each stage of a device")

    def take(self, plans: list[Candidate]) -> None:
        """The plans of a round. InfeasibleError if devices are over their limits with them, and
        nothing else is left to try."""
        number, say, is_last = self._number, self._say, self._is_last
        # Each memory is checked, so that stages give up some of each where they have to.
        each_fits = [each.fits(plans, number, say, is_last=is_last) for each in self._each]
        if all(each_fits):
            self.plans = plans


class _Sharing:
    """The limits of each stage for one memory: at first all of it."""

    def __init__(self, actions: PipelineSchedule, memory: SharedMemory) -> None:
        self.actions, self.memory = actions, memory
        self.ranks = [actions.ranks[stage] for stage in range(actions.num_stages)]
        self.own = [memory.limits[rank] for rank in self.ranks]
        self.least: dict[int, int] = {}
        self.is_open = memory.least is None
        """Whether stages without a plan may have one if all stages of a device get equal parts."""
        self.is_less = False

    def shares_evenly(self) -> bool:
        """Gives the stages of each device equal parts, if some have less than all and that is
        new."""
        if not (self.is_open and self.is_less):
            return False
        self.is_open = False
        limits, stages_of = self.memory.limits, self.actions.stages_of
        self.own = [limits[rank] // len(stages_of(rank)) for rank in self.ranks]
        return True

    def fits(
        self, candidates: Sequence[Candidate], number: int, say: Say, *, is_last: bool
    ) -> bool:
        """Whether no device is over its limit. If one is, its stages get less from now on.
        InfeasibleError if they have nothing to spare, or this round `is_last`."""
        totals, limits = self.memory.held(candidates), self.memory.limits
        over = {k: n - limits[k] for k, n in enumerate(totals) if n > limits[k]}
        for rank, excess in over.items():
            stages = self.actions.stages_of(rank)
            say(f"{stages_text(stages)} exceed {self.memory.called} by {format_bytes(excess)}")
            spare = {stage: self._spare(stage, candidates[stage]) for stage in stages}
            if not any(spare.values()) or is_last:
                raise InfeasibleError(
                    f"{stages_text(stages)} share a device: the smallest-memory plans found peak "
                    f"at {format_bytes(totals[rank])} together, {format_bytes(excess)} over the "
                    f"{self.memory.called} of {format_bytes(limits[rank])}. {self.memory.remedy}"
                )
            # Sooner or later all is given up that can be.
            self._give_up(candidates, spare, (1 + number) * excess)
        return not over

    def _spare(self, stage: int, candidate: Candidate) -> int:
        if stage not in self.least:
            least = self.memory.least
            self.least[stage] = 0 if least is None else least(stage, candidate)
        return max(0, self.memory.held_by(candidate) - self.least[stage])

    def _give_up(
        self, candidates: Sequence[Candidate], spare: Mapping[int, int], excess: int
    ) -> None:
        """Stages with something to spare get limits below what they hold."""
        self.is_less = True
        total = sum(spare.values())
        given_up = min(excess, total)
        for stage, n in spare.items():
            if n:
                held = self.memory.held_by(candidates[stage])
                self.own[stage] = held - ceil(given_up * n / total)
