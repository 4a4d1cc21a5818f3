"""The pipeline schedules that have names, as tables.

There are p ranks, whose equal stages take f for forward and b for backward, w of that for the
gradients of weights. Below is how long a rank waits at most between its first and its last action.
Sends take no time, and the number m of microbatches is large enough (a multiple of p if stages are
interleaved):

| name        | stages per rank | waits for the longest            | parts of microbatches held    |
| ----------- | --------------- | -------------------------------- | ----------------------------- |
| gpipe       | 1               | (p - 1)(f + b)                   | m                             |
| 1f1b        | 1               | (p - 1)(f + b)                   | p - rank                      |
| eager-1f1b  | 1               | (p - 1)(f + b)                   | 2(p - rank) - 1               |
| interleaved | v               | (p - 1)(f + b)/v                 | p + (p - 2 rank - 1)/v        |
| zb-h1       | 1               | (p - 1)(f + b - 2w) for w <= f, b/2 | p                          |
| zb          | v               | (p - 1)(f + b - 2w)/v, likewise     | p                          |
| zb-v        | 2               | 0 for f = b/2 = w                | p                             |

If sends take time, 1f1b waits for them in every microbatch. eager-1f1b waits for none that takes
half of f + b or less.

Sources: GPipe (arXiv:1811.06965), PipeDream-Flush (arXiv:2006.09503), its eager form
(arXiv:2211.05322), Megatron-LM's interleaving (arXiv:2104.04473), zero-bubble pipelines
(arXiv:2401.10241, 2405.15362).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain

from autopar.errors import StageError
from autopar.ir.pipeline import Action, Pass, PipelineSchedule

ONE_AFTER_THE_OTHER = "1f1b"
"""The schedule of one stage: forward and backward of each microbatch."""

F, B, W = Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS

_Part = tuple[int, Pass]
"""A stage, and the pass of a microbatch in it."""


@lru_cache(maxsize=8)
def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """The schedule `name` of `microbatches` on `ranks` ranks; one of `IN_CHUNKS` has `chunks`
    stages on each. StageError if there is no such schedule."""
    if name not in SCHEDULES:
        raise StageError(f"no schedule is called {name!r}: there are {', '.join(SCHEDULES)}")
    if min(ranks, microbatches, chunks) < 1:
        raise StageError(f"{name} of {microbatches} microbatches on {ranks} ranks: at least one")
    if chunks != 1 and name not in IN_CHUNKS:
        raise StageError(f"{name} has a number of stages per rank of its own")
    if not has_order(name, ranks, microbatches):
        raise StageError(
            f"{microbatches} microbatches are not interleaved on {ranks} ranks: their number has "
            f"to be divided by {_rounds(ranks, microbatches)}"
        )
    rows = (SCHEDULES[name](rank, ranks, microbatches, chunks) for rank in range(ranks))
    table = PipelineSchedule(tuple(_actions(row, microbatches) for row in rows))
    table.check()
    return table


def named_schedule(schedule: str, ranks: int, microbatches: int) -> PipelineSchedule:
    """The same for a name with the number of stages per rank: `interleaved:2`."""
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


def _actions(parts: Iterable[_Part], microbatches: int) -> tuple[Action, ...]:
    """`parts`, each with the next microbatch of its stage and kind, as long as there is one."""
    done, actions = Counter[_Part](), list[Action]()
    for part in parts:
        if done[part] < microbatches:
            actions.append(Action(*part, done[part]))
        done[part] += 1
    return tuple(actions)


# What a rank does; parts for which no microbatch is left are dropped.


def _gpipe(rank: int, _: int, microbatches: int, __: int) -> list[_Part]:
    """All forwards, then all backwards."""
    return [(rank, F)] * microbatches + [(rank, B)] * microbatches


def _one_f_one_b(rank: int, ranks: int, microbatches: int, _: int) -> list[_Part]:
    """Forwards until the first backward can come, then one forward for each backward."""
    return [(rank, F)] * (ranks - rank - 1) + [(rank, F), (rank, B)] * microbatches


def _eager_1f1b(rank: int, ranks: int, microbatches: int, _: int) -> list[_Part]:
    """1F1B with one more forward ahead for each rank behind: a send may take as long as the work on
    half a microbatch, in each direction."""
    return [(rank, F)] * (2 * (ranks - rank - 1)) + [(rank, F), (rank, B)] * microbatches


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[_Part]:
    """1F1B with several stages per rank, `ranks` apart: microbatches go through the first of them
    in rounds of as many as there are ranks, then through the next."""
    forward, backward, at_once = _in_rounds(rank, ranks, microbatches, chunks)
    ahead = min(len(forward), (chunks - 1) * at_once + 2 * (ranks - 1 - rank))
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *chain.from_iterable(pairs), *backward[len(backward) - ahead :]]


def _zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int) -> list[_Part]:
    """1F1B, interleaved or not, in which gradients of weights are delayed until they fill the gaps
    at the end; every rank then holds as much as the first. Ranks begin with one forward less for
    each rank behind. The gradients of weights of as many backwards as there are ranks before them
    are left for the end."""
    forward, backward, at_once = _in_rounds(rank, ranks, microbatches, chunks)
    weights = [(stage, W) for stage, _ in backward]
    ahead = min(len(forward), (chunks - 1) * at_once + ranks - 1 - rank)
    parts = forward[:ahead]
    for k, each in enumerate(backward):
        parts += [*forward[ahead + k : ahead + k + 1], each]
        parts += weights[k - rank : k - rank + 1] if k >= rank else ()
    return parts + weights[max(0, len(weights) - rank) :]


def _in_rounds(
    rank: int, ranks: int, microbatches: int, chunks: int
) -> tuple[list[_Part], list[_Part], int]:
    """The forwards and the backwards of a rank, by stage, and how many microbatches go through each
    of its stages before the next."""
    at_once = microbatches // _rounds(ranks, microbatches)
    order = [k // at_once % chunks for k in range(microbatches * chunks)]
    forward = [(chunk * ranks + rank, F) for chunk in order]
    return forward, [((chunks - 1 - chunk) * ranks + rank, B) for chunk in order], at_once


def _zb_v(rank: int, ranks: int, microbatches: int, _: int) -> list[_Part]:
    """Two stages per rank, of which the second ones come in the order of ranks reversed: the last
    microbatch's way back meets the first one's way forth on every rank."""
    down, up, behind = rank, 2 * ranks - 1 - rank, ranks - rank
    return [
        *[(down, F)] * (2 * behind - 1),
        *[(up, F), (down, F)] * rank,
        *[(up, F), (up, B), (up, W)] * behind,
        *[(down, F), (down, B), (down, W), (up, F), (up, B), (up, W)]
        * max(microbatches - ranks, ranks - 1),
        *[(down, B), (up, B)] * rank,
        *[(down, B), (down, W)] * behind,
        *[(up, W)] * microbatches,
        *[(down, W)] * microbatches,
    ]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[_Part]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "eager-1f1b": _eager_1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
    "zb-v": _zb_v,
    "zb": _zero_bubble,
}
"""By name, the function of (rank, ranks, microbatches, stages per rank) that lists what a rank
does."""

IN_CHUNKS = ("interleaved", "zb")
"""Those with any number of stages per rank: 2, unless a number follows, as in `zb:3`."""

STAGES_PER_RANK = {"zb-v": 2}
"""The schedules in which it is fixed, and not 1."""
