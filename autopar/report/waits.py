"""Who waits for whom in a pipeline: what each rank does when, and why it begins no earlier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from autopar.ir.pipeline import Action, ActionSpan, Hop, Pass, PipelineSchedule, incoming, needs
from autopar.plans.pipelines import SimulatedPipeline


@dataclass(frozen=True, slots=True)
class SimulatedAction:
    """An action from `start_ns` to `end_ns`. Before it, its rank waits `waited_ns` for the message
    of the action `after`, which is in flight along `hop` for `sent_ns` of that."""

    action: Action
    start_ns: int
    end_ns: int
    waited_ns: int = 0
    sent_ns: int = 0
    after: Action | None = None
    hop: Hop | None = None


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """The actions of a rank, one after the other, and from `complete_ns` on its optimizer's step
    for `update_ns`; all of that takes `busy_ns`. Before the optimizer, messages with other ranks
    take `shared_ns`. The rank waits `before_ns` until its first action, `between_ns` until its last
    one is done, and `behind_ns` after that until the step is over."""

    stages: tuple[int, ...]
    actions: tuple[SimulatedAction, ...]
    update_ns: int
    busy_ns: int
    complete_ns: int
    shared_ns: int
    before_ns: int
    between_ns: int
    behind_ns: int

    @property
    def waits_ns(self) -> int:
        """How long it waits in all."""
        return self.before_ns + self.between_ns + self.behind_ns


def simulated_ranks(
    schedule: PipelineSchedule, simulated: SimulatedPipeline
) -> tuple[SimulatedRank, ...]:
    """The ranks of a simulated schedule."""
    sources = incoming(simulated.delays_ns)

    def with_wait(action: Action, free_ns: int) -> SimulatedAction:
        start_ns, end_ns = simulated.spans[action]
        for source, hop in needs(action, sources):
            late_ns = 0 if hop is None else simulated.delays_ns[hop]
            if start_ns > free_ns and simulated.spans[source].end + late_ns == start_ns:
                waited_ns = start_ns - free_ns
                sent_ns = min(waited_ns, late_ns)
                return SimulatedAction(action, start_ns, end_ns, waited_ns, sent_ns, source, hop)
        return SimulatedAction(action, start_ns, end_ns)

    def rank(k: int) -> SimulatedRank:
        row = schedule.rows[k]
        free = [0, *(simulated.spans[action].end for action in row)]
        actions = tuple(map(with_wait, row, free))
        complete_ns, shared_ns = simulated.complete_ns[k], simulated.shared_ns[k]
        update_ns = simulated.ends_ns[k] - complete_ns
        worked_ns = sum(each.end_ns - each.start_ns for each in actions)
        return SimulatedRank(
            tuple(sorted({action.stage for action in row})),
            actions,
            update_ns,
            worked_ns + update_ns,
            complete_ns,
            shared_ns,
            actions[0].start_ns,
            free[-1] - actions[0].start_ns - worked_ns,
            simulated.step_ns - free[-1] - shared_ns - update_ns,
        )

    return tuple(map(rank, range(len(schedule.rows))))


def exposed_ns(ranks: tuple[SimulatedRank, ...]) -> Mapping[Hop, int]:
    """How long receivers wait in a step while messages are in flight, by hop."""
    exposed: Counter[Hop] = Counter()
    for rank in ranks:
        for each in rank.actions:
            if each.hop is not None:
                exposed[each.hop] += each.sent_ns
    return exposed


# A step of a pipeline as a picture of text.

COLUMNS = 72
"""Columns of the picture of a step."""

MAX_RANKS = 32
"""Rows of it."""

_STYLES = {Pass.FORWARD: "blue", Pass.BACKWARD: "green", Pass.WEIGHTS: "yellow"}
_MARKS = {Pass.FORWARD: "0123456789", Pass.BACKWARD: "abcdefghij", Pass.WEIGHTS: "ABCDEFGHIJ"}
"""What stands for an action: the last digit of its microbatch, in backward as a letter."""


def draw(
    actions: PipelineSchedule, spans: Mapping[Action, ActionSpan], width: int = COLUMNS
) -> tuple[str, ...]:
    """A line per rank, in which each column is an equal part of the time until the last action is
    over: what is done in the middle of it."""
    end = max(span.end for span in spans.values())
    lines: list[str] = []
    for row in actions.rows[:MAX_RANKS]:
        line = [" "] * width
        for action in row:
            span = spans[action]
            for column in range(span.start * width // end, -(-span.end * width // end)):
                middle = (2 * column + 1) * end
                if 2 * width * span.start <= middle < 2 * width * span.end:
                    line[column] = _MARKS[action.kind][action.microbatch % 10]
        lines.append("".join(line))
    return tuple(lines)


def coloured(line: str) -> Text:
    """A line of the picture, in colours."""
    kinds = {mark: kind for kind, marks in _MARKS.items() for mark in marks}
    text = Text()
    for mark in line:
        text.append(mark, _STYLES[kinds[mark]] if mark in kinds else "")
    return text
