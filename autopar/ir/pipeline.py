"""Pipeline schedules: tables with a row of actions per rank.

Stages are numbered as the model computes them. A rank may have several. It does the actions of its
row one after the other, each as soon as what it needs has come. As text a row is `0F0 0F1 0B0 0W0`:
of stage 0 the forward of microbatches 0 and 1, then the backward of microbatch 0 in two parts. `B`
is the part that other stages wait for, `W` the rest, which makes the gradients of parameters.
Without any `W` in the table, `B` is all of backward. A stage may take microbatches in any order,
forward and backward.

Tables as torch writes them are read as well: `I` is the first part of a backward, and `B` without a
`W` of its own is both parts, one right after the other; `(0F1;1B0)OVERLAP_F_B` is one action after
the other. What torch lists beside (messages, `UNSHARD`, `REDUCE_GRAD`) follows from the plan here,
and is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from autopar.errors import StageError
from autopar.ir.graph import Phase
from autopar.ir.grouping import grouped

_ACTION = re.compile(r"(0|[1-9][0-9]{0,5})([FBIW])(0|[1-9][0-9]{0,5})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_BESIDE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")
"""The entries of a table of torch that are no pass of a microbatch."""


class Pass(StrEnum):
    """A pass of a microbatch through a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of what a stage receives, and all others if there is no `WEIGHTS`."""
    WEIGHTS = "W"
    """The gradients of parameters."""


class Action(NamedTuple):
    """One microbatch goes through one stage, forward or backward."""

    stage: int
    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of `str`; StageError on anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise StageError(f"{text!r} is no action: write 0F3 for microbatch 3 of stage 0")
        stage, kind, microbatch = match.groups()
        return Action(int(stage), Pass(kind.replace("I", "B")), int(microbatch))


def is_action(text: str) -> bool:
    """Whether `text` is an action that `Action.parse` reads."""
    return _ACTION.fullmatch(text) is not None


class Waiting(NamedTuple):
    """The number of microbatches that wait for all of backward in a stage, so that it holds what
    that reads, and of those that wait for the second part alone."""

    backward: int
    weights: int = 0


Hop = tuple[int, int, Phase]
"""(source, target, phase): stage `source` sends a tensor to stage `target` in that phase."""


def hops_in_sequence(stages: int) -> frozenset[Hop]:
    """The hops where each stage sends to its neighbours alone: to the next one forward, to the one
    before backward."""
    line = range(stages - 1)
    forward = ((s, s + 1, Phase.FORWARD) for s in line)
    return frozenset((*forward, *((s + 1, s, Phase.BACKWARD) for s in line)))


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank of a pipeline, in order."""

    rows: tuple[tuple[Action, ...], ...]

    @staticmethod
    def parse(text: str) -> PipelineSchedule:
        """The schedule from a table with a line per rank, actions apart by blanks or commas.
        StageError, naming what is wrong, on anything else, and where ranks would wait for each
        other."""
        rows = (tuple(map(Action.parse, _words(line))) for line in text.strip().splitlines())
        table = PipelineSchedule(tuple(rows)).with_second_parts()
        table.check()
        return table

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(sorted(stage for stage, at in self.ranks.items() if at == rank))

    @cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for row in self.rows for action in row)

    @cached_property
    def is_split(self) -> bool:
        """Whether backward comes in two parts."""
        return any(action.kind is Pass.WEIGHTS for row in self.rows for action in row)

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def _last(self) -> Mapping[tuple[int, Pass], int]:
        """The last microbatch of each stage, by kind of pass."""
        return {(a.stage, a.kind): a.microbatch for row in self.rows for a in row}

    def last_microbatches(self, stage: int) -> tuple[int, int]:
        """The last microbatches of a stage, in forward and in the gradients of parameters."""
        final = Pass.WEIGHTS if self.is_split else Pass.BACKWARD
        return self._last[stage, Pass.FORWARD], self._last[stage, final]

    def is_last(self, action: Action) -> bool:
        """Whether an action is of the last microbatch of its stage (`last_microbatches`)."""
        is_backward = action.kind is not Pass.FORWARD
        return action.microbatch == self.last_microbatches(action.stage)[is_backward]

    def with_second_parts(self) -> PipelineSchedule:
        """The same table, with `WEIGHTS` right after each backward that lacks them, if any backward
        of the table has them."""
        if not self.is_split:
            return self
        there = {
            (a.stage, a.microbatch) for row in self.rows for a in row if a.kind is Pass.WEIGHTS
        }

        def both(action: Action) -> tuple[Action, ...]:
            is_whole = (
                action.kind is Pass.BACKWARD and (action.stage, action.microbatch) not in there
            )
            return (action, action._replace(kind=Pass.WEIGHTS)) if is_whole else (action,)

        return PipelineSchedule(tuple(tuple(b for a in row for b in both(a)) for row in self.rows))

    def check(self, hops: Collection[Hop] | None = None) -> None:
        """StageError, saying where, unless every microbatch goes through every stage once, and no
        rank waits for ever. Stages send along `hops`, by default to their neighbours alone."""
        if not self.rows or not all(self.rows):
            raise StageError("a rank of the table has nothing to do")
        stages, microbatches = sorted(self.ranks), range(self.microbatches)
        if stages != list(range(len(stages))):
            raise StageError(f"the table has stages {stages}: number them from 0 on")
        kinds = list(Pass) if self.is_split else [Pass.FORWARD, Pass.BACKWARD]
        for stage in stages:
            rows = {
                rank for rank, row in enumerate(self.rows) if any(a.stage == stage for a in row)
            }
            if len(rows) > 1:
                raise StageError(f"stage {stage} is on ranks {sorted(rows)}: a stage has one")
            row = self.rows[self.ranks[stage]]
            for kind in kinds:
                numbers = [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)]
                if len(numbers) != len(microbatches) or sorted(numbers) != list(microbatches):
                    raise StageError(
                        f"stage {stage} does {kind.value} of microbatches {numbers}: it has to do "
                        f"each of 0 to {len(microbatches) - 1} once"
                    )
        simulate_actions(self, lambda _: 1, hops)

    def in_flight(self, stage: int) -> int:
        """The most microbatches at a time that have gone forward through a stage, and not back."""
        most = now = 0
        last = Pass.WEIGHTS if self.is_split else Pass.BACKWARD
        for action in self.rows[self.ranks[stage]]:
            if action.stage == stage:
                now += (action.kind is Pass.FORWARD) - (action.kind is last)
                most = max(most, now)
        return most

    def others(self, stage: int) -> tuple[Waiting, ...]:
        """The numbers of other microbatches that wait while a stage works on one. Of all points in
        time those are listed that no other exceeds in both numbers."""
        row = [a for a in self.rows[self.ranks[stage]] if a.stage == stage]
        now, waiting = Counter[Pass](), set[Waiting]()
        for _, kind, _ in row:
            now[kind] += 1
            done = {each: now[each] - (kind is each) for each in Pass}
            if self.is_split:
                # The microbatch that it works on is none of the others.
                back = done[Pass.FORWARD] - now[Pass.BACKWARD]
                waiting.add(Waiting(back, done[Pass.BACKWARD] - now[Pass.WEIGHTS]))
            else:
                waiting.add(Waiting(done[Pass.FORWARD] - now[Pass.BACKWARD]))
        return tuple(sorted(a for a in waiting if not any(_is_more(b, a) for b in waiting)))

    def first(self, microbatches: int) -> PipelineSchedule:
        """The same schedule for its first `microbatches`."""
        return PipelineSchedule(
            tuple(tuple(a for a in row if a.microbatch < microbatches) for row in self.rows)
        )


def _words(line: str) -> list[str]:
    """The actions in a line of a table."""
    apart = _OVERLAPPED.sub(lambda match: match[1].replace(";", " "), line).replace(",", " ")
    return [word for word in apart.split() if not _BESIDE.fullmatch(word)]


def _is_more(a: Waiting, b: Waiting) -> bool:
    return a != b and a.backward >= b.backward and a.weights >= b.weights


class ActionSpan(NamedTuple):
    """When something starts and ends."""

    start: int
    end: int


Incoming = Mapping[tuple[int, Phase], Sequence[Hop]]
"""The hops by which a stage receives tensors, by stage and phase."""


def incoming(hops: Collection[Hop]) -> Incoming:
    """The hops by their target and phase."""
    return grouped(((hop[1], hop[2]), hop) for hop in sorted(hops))


def needs(action: Action, sources: Incoming) -> Iterator[tuple[Action, Hop | None]]:
    """The actions that have to be over before an action, each with the hop along which its result
    comes, None in the same stage."""
    stage, kind, microbatch = action
    if kind is Pass.WEIGHTS:
        yield Action(stage, Pass.BACKWARD, microbatch), None
        return
    if kind is Pass.BACKWARD:
        yield Action(stage, Pass.FORWARD, microbatch), None
    phase = Phase.FORWARD if kind is Pass.FORWARD else Phase.BACKWARD
    for hop in sources.get((stage, phase), ()):
        yield Action(hop[0], kind, microbatch), hop


def simulate_actions(
    actions: PipelineSchedule,
    length: Callable[[Action], int],
    hops: Collection[Hop] | None = None,
    delay: Callable[[Hop], int] = lambda _: 0,
) -> dict[Action, ActionSpan]:
    """The span of each action, in the unit of `length`. What is sent along one of `hops` comes
    `delay` after the action is over. StageError if ranks wait for each other for ever."""
    sources = incoming(hops_in_sequence(actions.num_stages) if hops is None else hops)
    spans: dict[Action, ActionSpan] = {}
    free, done = [0] * len(actions.rows), [0] * len(actions.rows)

    def ready(action: Action) -> int | None:
        """The time when all that an action waits for has come; None if that is not known yet."""
        before = list(needs(action, sources))
        if any(each not in spans for each, _ in before):
            return None
        ends = (spans[each].end + (0 if hop is None else delay(hop)) for each, hop in before)
        return max(ends, default=0)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions.rows):
            while done[rank] < len(row) and (when := ready(row[done[rank]])) is not None:
                action = row[done[rank]]
                start = max(when, free[rank])
                free[rank] = start + length(action)
                spans[action] = ActionSpan(start, free[rank])
                done[rank] += 1
                moved = True
    stuck = [str(row[k]) for row, k in zip(actions.rows, done, strict=True) if k < len(row)]
    if stuck:
        raise StageError(f"the ranks wait for each other: {', '.join(stuck)} never start")
    return spans


def answers(rows: Sequence[Sequence[Action]], rank: int) -> frozenset[Action]:
    """The actions of a rank that wait for an answer to its action just before: they receive what
    other ranks compute from what that sends. Stages send to their neighbours alone."""
    sources = incoming(hops_in_sequence(1 + max(a.stage for row in rows for a in row)))
    row_of = {action: number for number, row in enumerate(rows) for action in row}
    # Per action, the place in the rank's row of the last action that it depends on.
    behind: dict[Action, int] = {}
    done, moved = [0] * len(rows), True
    while moved:
        moved = False
        for number, row in enumerate(rows):
            for action in row[done[number] :]:
                before = [each for each, _ in needs(action, sources) if each in row_of]
                if done[number]:
                    before.append(row[done[number] - 1])
                if any(each not in behind for each in before):
                    break
                last = max((behind[each] for each in before), default=-1)
                behind[action] = done[number] if number == rank else last
                done[number] += 1
                moved = True
    return frozenset(
        action
        for place, action in enumerate(rows[rank])
        if place
        and any(
            behind[each] >= place - 1
            for each, hop in needs(action, sources)
            if hop and row_of[each] != rank
        )
    )
