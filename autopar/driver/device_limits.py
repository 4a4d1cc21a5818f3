"""Stages that share devices, planned so that a device holds all of its own together.

How much of a device's memory each of its stages is to have nobody knows beforehand. So each is
planned at first as if it had all; where that is too much for a device, each gives up some of what
it holds beyond what it holds at the least, in proportion, until they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from autopar.compile import Say
from autopar.errors import InfeasibleError
from autopar.ir.pipeline import ActionTable
from autopar.ir.units import format_bytes
from autopar.plans.estimates import Memory
from autopar.plans.fitting import Candidate

_ROUNDS = 8
"""How often the stages of a device are planned anew. What one gives up at its fullest moment is
not all given up at the device's."""

PlanAll = Callable[[Sequence[int]], list[Candidate]]
"""The plans of all stages, each within so many bytes."""

HeldOnDevices = Callable[[Sequence[Candidate]], Sequence[Memory]]
"""What a device of each rank holds where stages are planned so."""


def plan_within_devices(
    table: ActionTable,
    limits: Sequence[int],
    planned: PlanAll,
    held: HeldOnDevices,
    least: Callable[[int, Candidate], int],
    say: Say,
) -> list[Candidate]:
    """Plans of all stages, of which no device of a rank holds more than its share of `limits`, by
    rank; `least` says what the leanest plan of a stage holds. InfeasibleError if none are
    found."""
    own = [limits[table.ranks[stage]] for stage in range(table.num_stages)]
    known: dict[int, int] = {}
    for number in range(_ROUNDS):
        found = planned(own)
        totals = [memory.total for memory in held(found)]
        over = {k: n - limits[k] for k, n in enumerate(totals) if n > limits[k]}
        if not over:
            return found
        for rank, excess in over.items():
            stages = table.stages_of(rank)
            say(f"{_text(stages)} exceed the memory of their device by {format_bytes(excess)}")
            spare: dict[int, int] = {}
            for stage in stages:
                if stage not in known:
                    known[stage] = least(stage, found[stage])
                spare[stage] = max(0, found[stage].estimates.memory.total - known[stage])
            if not any(spare.values()) or number == _ROUNDS - 1:
                raise InfeasibleError(
                    f"{_text(stages)} share a device: the leanest plans found peak at "
                    f"{format_bytes(totals[rank])} together, {format_bytes(excess)} over the "
                    f"memory limit of {format_bytes(limits[rank])}. Raise --memory-limit, use more "
                    "devices, or lower the batch"
                )
            # Sooner or later all is given up that can be.
            own = _with_less(own, found, spare, (1 + number) * excess)
    raise AssertionError("the last round returns or raises")


def _with_less(
    own: Sequence[int], found: Sequence[Candidate], spare: Mapping[int, int], excess: int
) -> list[int]:
    """The bytes that stages are planned within, those with something to spare with less than they
    hold."""
    total = sum(spare.values())
    given_up = min(excess, total)
    less = {k: ceil(given_up * n / total) for k, n in spare.items() if n}
    totals = (each.estimates.memory.total for each in found)
    return [n - less[k] if k in less else own[k] for k, n in enumerate(totals)]


def _text(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
