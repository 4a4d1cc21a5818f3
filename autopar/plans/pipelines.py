"""The stages of a pipeline, played together: each does what its row of the table lists, as soon as
what it needs has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Phase
from autopar.ir.pipeline import Action, ActionSpan, ActionTable, Hop, hops_in_line, play_table
from autopar.plans.estimates import Delay, Estimates


@dataclass(frozen=True, slots=True)
class PlayedPipeline:
    """When each action starts and ends, when each rank is done with the optimizer's step, and what
    is sent along each hop takes."""

    spans: Mapping[Action, ActionSpan]
    ends_ns: tuple[int, ...]
    delays_ns: Mapping[Hop, int]

    @property
    def step_ns(self) -> int:
        """From the first action to the end of the last rank's step."""
        return max(self.ends_ns)


def play_pipeline(
    table: ActionTable, stages: Sequence[Estimates], sends: Sequence[Delay]
) -> PlayedPipeline:
    """The step of a pipeline whose stages take what `stages` says for each microbatch."""
    last = table.microbatches - 1

    def length(action: Action) -> int:
        is_last = action.microbatch == last
        return stages[action.stage].turn.length_ns(action.kind, is_last=is_last)

    late: dict[Hop, int] = dict.fromkeys(hops_in_line(len(stages)), 0)
    late |= {(d.source, d.target, Phase(d.phase)): d.time_ns for d in sends}
    spans = play_table(table, length, late, late.__getitem__)
    ends = [
        max(spans[action].end for action in row)
        + sum(stages[s].turn.update_ns for s, at in table.ranks.items() if at == rank)
        for rank, row in enumerate(table.rows)
    ]
    return PlayedPipeline(spans, tuple(ends), late)
