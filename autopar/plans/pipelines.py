"""The simulation of a pipeline: each rank does what its row of the schedule lists, as soon as its
inputs have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import astuple

from autopar.ir.graph import Phase
from autopar.ir.pipeline import (
    Action,
    ActionSpan,
    Hop,
    PipelineSchedule,
    hops_in_sequence,
    simulate_actions,
)
from autopar.plans.estimates import Delay, Estimates, Memory, Shared, StageEstimates


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """A simulated step. `spans` has the start and end of each action. By rank, `busy_ns` is how
    long it works, and `shared_ns` how long its messages at the end take. Those are complete at
    `complete_ns`, and its optimizer's step is done at `ends_ns`. `delays_ns` is the time of a send
    along each hop."""

    spans: Mapping[Action, ActionSpan]
    busy_ns: tuple[int, ...]
    shared_ns: tuple[int, ...]
    complete_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    delays_ns: Mapping[Hop, int]

    @property
    def step_ns(self) -> int:
        """From the first action to the end of the last rank's step."""
        return max(self.ends_ns)


def memory_of_devices(estimates: Estimates, actions: PipelineSchedule) -> tuple[Memory, ...]:
    """The peak of a device of each rank, for all of its stages. If the plan does not say, it is the
    sum of the peaks of its stages, which is never less."""
    if estimates.devices:
        return estimates.devices
    by_rank = (
        [astuple(estimates.stages[stage].memory) for stage in actions.stages_of(rank)]
        for rank in range(len(actions.rows))
    )
    return tuple(Memory(*map(sum, zip(*each, strict=True))) for each in by_rank)


def simulate_pipeline(
    actions: PipelineSchedule,
    stages: Sequence[StageEstimates],
    sends: Sequence[Delay],
    shared: Sequence[Shared],
) -> SimulatedPipeline:
    """The step of a pipeline; `stages` has the times of a microbatch in each stage. Each of the
    `shared` messages waits for the last of its ranks, and they come one after the other."""

    def length(action: Action) -> int:
        microbatch = stages[action.stage].microbatch
        return microbatch.length_ns(action.kind, is_last=actions.is_last(action))

    late: dict[Hop, int] = dict.fromkeys(hops_in_sequence(len(stages)), 0)
    late |= {(d.source, d.target, Phase(d.phase)): d.time_ns for d in sends}
    spans = simulate_actions(actions, length, late, late.__getitem__)
    complete = [max(spans[action].end for action in row) for row in actions.rows]
    busy = [sum(map(length, row)) for row in actions.rows]
    sharing = [0] * len(actions.rows)
    for each in shared:
        end_ns = max(complete[rank] for rank in each.ranks) + each.time_ns
        for rank in each.ranks:
            complete[rank] = end_ns
            sharing[rank] += each.time_ns
    ends = list(complete)
    for stage, rank in actions.ranks.items():
        ends[rank] += stages[stage].microbatch.update_ns
        busy[rank] += stages[stage].microbatch.update_ns
    return SimulatedPipeline(spans, tuple(busy), tuple(sharing), tuple(complete), tuple(ends), late)
