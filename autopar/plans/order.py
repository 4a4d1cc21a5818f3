"""The order of a step in the file of a plan: events as text, repetitions folded.

An item is the key of an op, `OPTIMIZER`, or a word and what it is about, STEP of the route of the
tensor KEY:

* `start STEP KEY` begins a message, `with STEP KEY` behind it is one more tensor in it;
* `wait STEP KEY` is the end of the first message that began with that and has not ended;
* `cut STEP KEY` takes a slice, which sends nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from autopar.ir.graph import Graph
from autopar.ir.grouping import grouped
from autopar.ir.schedule import Compute, Event, Message, Start, Take, Transfer, Update, Wait

OPTIMIZER = "optimizer"
START, WITH, WAIT, CUT = "start", "with", "wait", "cut"
_MAX_DIGITS = 4
"""Of the number of a step."""

_PERIODS = 8
"""How many occurrences of an item are tried for the start of the next repetition."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a step: `items` one after the other, all of it `times` times."""

    times: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    items: tuple[str, ...]


class Item(NamedTuple):
    """An item about step `step` of the route of the tensor `key`."""

    word: str
    step: int
    key: str

    @staticmethod
    def parse(text: str) -> Item:
        """ValueError if it is about no tensor."""
        word, _, rest = text.partition(" ")
        step, _, key = rest.partition(" ")
        is_number = step.isascii() and step.isdecimal() and len(step) <= _MAX_DIGITS
        if word not in (START, WITH, WAIT, CUT) or not is_number or str(int(step)) != step:
            raise ValueError(f"order: {text!r} is neither an op nor a word about a tensor")
        return Item(word, int(step), key)


def order(graph: Graph, events: Iterable[Event]) -> tuple[Run, ...]:
    """`events` as a plan lists them, without those that take no time."""
    return repeated([text for event in events for text in _texts(graph, event)])


def _texts(graph: Graph, event: Event) -> Iterator[str]:
    match event:
        case Compute(node):
            yield graph.nodes[node].key
        case Start(Message((first, *others))):
            yield _text(START, first)
            yield from (_text(WITH, other) for other in others)
        case Wait(message):
            yield _text(WAIT, message.transfers[0])
        case Take(transfer, None):
            yield _text(CUT, transfer)
        case Update():
            yield OPTIMIZER
        case _:
            pass


def _text(word: str, transfer: Transfer) -> str:
    return f"{word} {transfer.step} {transfer.key}"


def repeated(items: Sequence[str]) -> tuple[Run, ...]:
    """`items` as runs, each repeated as often as it follows itself."""
    places = grouped((item, place) for place, item in enumerate(items))
    seen: dict[str, int] = defaultdict(int)
    runs: list[Run] = []
    single: list[str] = []
    place = 0
    while place < len(items):
        item = items[place]
        while places[item][seen[item]] < place:
            seen[item] += 1
        following = places[item][seen[item] + 1 : seen[item] + 1 + _PERIODS]
        candidates = [(_times(items, place, other - place), other - place) for other in following]
        times, period = max(
            candidates, key=lambda each: (each[0] * each[1], each[0]), default=(1, 1)
        )
        if times > 1:
            runs += [Run(1, tuple(single))] if single else []
            runs.append(Run(times, tuple(items[place : place + period])))
            single.clear()
            place += times * period
        else:
            single.append(item)
            place += 1
    return (*runs, *([Run(1, tuple(single))] if single else []))


def _times(items: Sequence[str], place: int, period: int) -> int:
    """How often the `period` items from `place` on follow one another; 0 if once, so that a run
    that repeats is preferred."""
    body, times = items[place : place + period], 1
    while items[place + times * period : place + (times + 1) * period] == body:
        times += 1
    return times if times > 1 else 0
