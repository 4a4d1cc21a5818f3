"""The pipeline schedules that have names, as tables.

Of p ranks, whose stages take f forward and b backward, w of that for the gradients of weights, each
waits so long between its first and its last action while m microbatches go through them, if stages
are equal, sends take no time and m is large enough (a multiple of p where stages are interleaved):

| name        | stages per rank | waits for the longest            | parts of microbatches held    |
| ----------- | --------------- | -------------------------------- | ----------------------------- |
| gpipe       | 1               | (p - 1)(f + b)                   | m                             |
| 1f1b        | 1               | (p - 1)(f + b)                   | p - rank                      |
| eager-1f1b  | 1               | (p - 1)(f + b)                   | 2(p - rank) - 1               |
| interleaved | v               | (p - 1)(f + b)/v                 | p + (p - 2 rank - 1)/v        |
| zb-h1       | 1               | (p - 1)(f + b - 2w) for w <= f, b/2 | p                          |
| zb          | v               | (p - 1)(f + b - 2w)/v, likewise     | p                          |
| zb-v        | 2               | 0 for f = b/2 = w                | p                             |

Where sends take time, 1f1b waits for them in every turn, and eager-1f1b for none that take half of
f + b or less.

Sources: GPipe (arXiv:1811.06965), PipeDream-Flush (arXiv:2006.09503), its eager form
(arXiv:2211.05322), Megatron-LM's interleaving (arXiv:2104.04473), zero-bubble pipelines
(arXiv:2401.10241, 2405.15362).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

from autopar.errors import StageError
from autopar.ir.pipeline import Action, Pass, PipelineSchedule

ONE_AFTER_THE_OTHER = "1f1b"
"""The schedule of one stage: forward and backward of each microbatch."""

F, B, W = Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS


@lru_cache(maxsize=8)
def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """The schedule `name` of `microbatches` on so many ranks, with `chunks` stages on each where it
    is one of `IN_CHUNKS`. StageError if there is no such schedule."""
    if name not in SCHEDULES:
        raise StageError(f"no schedule is called {name!r}: there are {', '.join(SCHEDULES)}")
    if min(ranks, microbatches, chunks) < 1:
        raise StageError(f"{name} of {microbatches} microbatches on {ranks} ranks: at least one")
    if chunks != 1 and name not in IN_CHUNKS:
        raise StageError(f"{name} has a number of stages per rank of its own")
    table = SCHEDULES[name](ranks, microbatches, chunks)
    table.check()
    return table


def named_schedule(schedule: str, ranks: int, microbatches: int) -> PipelineSchedule:
    """The same of a schedule with its stages per rank: `interleaved:2`."""
    name, _, chunks = schedule.partition(":")
    if chunks and not (chunks.isascii() and chunks.isdecimal()):
        raise StageError(f"schedule {schedule!r} is none")
    return make_schedule(name, ranks, microbatches, int(chunks or 1))


def has_order(name: str, ranks: int, microbatches: int) -> bool:
    """Whether the schedule `name` has an order for so many microbatches."""
    return name not in IN_CHUNKS or not microbatches % _rounds(ranks, microbatches)


def _rounds(ranks: int, microbatches: int) -> int:
    """In how many rounds microbatches are interleaved."""
    return max(1, microbatches // ranks)


class _Row:
    """The actions of a rank, each with the next microbatch of its stage and kind, as long as there
    is one."""

    def __init__(self, microbatches: int) -> None:
        self.actions: list[Action] = []
        self.microbatches = microbatches
        self._next: Counter[tuple[int, Pass]] = Counter()

    def add(self, *what: tuple[int, Pass]) -> None:
        for stage, kind in what:
            microbatch = self._next[stage, kind]
            self._next[stage, kind] += 1
            if microbatch < self.microbatches:
                self.actions.append(Action(stage, kind, microbatch))

    def done(self, stage: int, kind: Pass) -> int:
        return self._next[stage, kind]


def _table(rows: Iterable[_Row]) -> PipelineSchedule:
    return PipelineSchedule(tuple(tuple(row.actions) for row in rows))


def _gpipe(ranks: int, microbatches: int, _: int) -> PipelineSchedule:
    """All forwards, then all backwards."""
    rows = [_Row(microbatches) for _ in range(ranks)]
    for rank, row in enumerate(rows):
        row.add(*[(rank, F)] * microbatches, *[(rank, B)] * microbatches)
    return _table(rows)


def _one_f_one_b(ranks: int, microbatches: int, _: int) -> PipelineSchedule:
    """As many forwards as it takes for the first backward to come, then one for each backward."""
    rows = [_Row(microbatches) for _ in range(ranks)]
    for rank, row in enumerate(rows):
        row.add(*[(rank, F)] * (ranks - rank - 1), *[(rank, F), (rank, B)] * microbatches)
    return _table(rows)


def _eager_1f1b(ranks: int, microbatches: int, _: int) -> PipelineSchedule:
    """1F1B with one more forward ahead for each rank behind: a send each way may take as long as
    the work on half a microbatch."""
    rows = [_Row(microbatches) for _ in range(ranks)]
    for rank, row in enumerate(rows):
        row.add(*[(rank, F)] * (2 * (ranks - rank - 1)), *[(rank, F), (rank, B)] * microbatches)
    return _table(rows)


def _interleaved(ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """1F1B with several stages per rank, `ranks` apart: microbatches go through the first of them
    in rounds of as many as there are ranks, then through the next."""
    rows, at_once = [_Row(microbatches) for _ in range(ranks)], _at_once(ranks, microbatches)
    for rank, row in enumerate(rows):
        forward, backward = _in_rounds(rank, ranks, microbatches, chunks, at_once)
        ahead = min(len(forward), (chunks - 1) * at_once + 2 * (ranks - 1 - rank))
        row.add(*forward[:ahead])
        for pair in zip(forward[ahead:], backward, strict=False):
            row.add(*pair)
        row.add(*backward[len(backward) - ahead :])
    return _table(rows)


def _zb_h1(ranks: int, microbatches: int, _: int) -> PipelineSchedule:
    """1F1B whose gradients of weights wait, so that every rank holds as much as the first, and
    fill the gaps at the end."""
    return _zero_bubble(ranks, microbatches, 1, microbatches)


def _zb(ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """The same with several stages per rank, interleaved."""
    return _zero_bubble(ranks, microbatches, chunks, _at_once(ranks, microbatches))


def _zero_bubble(ranks: int, microbatches: int, chunks: int, at_once: int) -> PipelineSchedule:
    """Ranks begin with one forward less for each rank behind than interleaved 1F1B has, and leave
    the gradients of weights of as many backwards as there are ranks before them for the end."""
    rows = [_Row(microbatches) for _ in range(ranks)]
    for rank, row in enumerate(rows):
        forward, backward = _in_rounds(rank, ranks, microbatches, chunks, at_once)
        weights = [(stage, W) for stage, _ in backward]
        ahead = min(len(forward), (chunks - 1) * at_once + ranks - 1 - rank)
        row.add(*forward[:ahead])
        for k, each in enumerate(backward):
            row.add(*forward[ahead + k : ahead + k + 1], each)
            row.add(*weights[k - rank : k - rank + 1] if k >= rank else ())
        row.add(*weights[max(0, len(weights) - rank) :])
    return _table(rows)


def _at_once(ranks: int, microbatches: int) -> int:
    """How many microbatches go through a stage of an interleaved rank before its next one."""
    rounds = _rounds(ranks, microbatches)
    if microbatches % rounds:
        raise StageError(
            f"{microbatches} microbatches are not interleaved on {ranks} ranks: their number has "
            f"to be divided by {rounds}"
        )
    return microbatches // rounds


def _in_rounds(
    rank: int, ranks: int, microbatches: int, chunks: int, at_once: int
) -> tuple[list[tuple[int, Pass]], list[tuple[int, Pass]]]:
    """The forwards and the backwards of a rank, by stage, where so many microbatches `at_once` go
    through each of its stages."""
    order = [k // at_once % chunks for k in range(microbatches * chunks)]
    forward = [(chunk * ranks + rank, F) for chunk in order]
    return forward, [((chunks - 1 - chunk) * ranks + rank, B) for chunk in order]


def _zb_v(ranks: int, microbatches: int, _: int) -> PipelineSchedule:
    """Two stages per rank, of which the second ones come in the order of ranks reversed: the last
    microbatch's way back meets the first one's way forth on every rank."""
    rows = [_Row(microbatches) for _ in range(ranks)]
    enough = max(microbatches, 2 * ranks - 1)
    for rank, row in enumerate(rows):
        down, up, behind = rank, 2 * ranks - 1 - rank, ranks - rank
        row.add(*[(down, F)] * (2 * behind - 1), *[(up, F), (down, F)] * rank)
        row.add(*[(up, F), (up, B), (up, W)] * behind)
        while row.done(up, F) < enough:
            row.add(*[(down, F)] * (row.done(down, F) < enough))
            row.add((down, B), (down, W), (up, F), (up, B), (up, W))
        row.add(*[(down, B), (up, B)] * rank, *[(down, B), (down, W)] * behind)
        for stage in (up, down):
            row.add(*[(stage, W)] * (enough - row.done(stage, W)))
    return _table(rows)


SCHEDULES: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "eager-1f1b": _eager_1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
    "zb": _zb,
}

IN_CHUNKS = ("interleaved", "zb")
"""Those with as many stages on a rank as one likes: 2, unless a number follows, as in `zb:3`."""

STAGES_PER_RANK = {"zb-v": 2}
"""Where that is neither 1 nor what one likes."""
