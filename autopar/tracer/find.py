"""The runs of a model, found by recording its step as it is and as it is without most of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from torch import nn

from autopar.tracer import torch_private
from autopar.tracer.capture import OutputFilter, staged
from autopar.tracer.recording import Kinds, Recorded, Recording, record
from autopar.tracer.runs import (
    MAX_PERIOD,
    MIN_LEFT_OUT,
    BlockRun,
    block_lists,
    block_name,
    shortened,
)
from autopar.tracer.stand_ins import MOST_TRACES, meta_tensor
from autopar.tracer.watch import Watch

# Which blocks of a recorded step execute alike (`runs`), from the recording.

Owner = tuple[int, int]
"""(run, number of a block in the whole model); `Stream.REST` for what is in no repeating block."""

_Item = tuple[int, tuple[Recorded, ...]]
"""(kind, reads) of an op or of a state that a block holds."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The forward and the backward ops of each block of a list, in order. A span goes on to where
    the next block begins, so that ops between blocks belong to the one before. Backward spans of
    the first blocks, which have no known end, are None."""

    forward: tuple[range, ...]
    backward: tuple[range | None, ...]


def spans(recording: Recording, path: str, count: int) -> Spans | None:
    """The spans of `count` blocks of the list at `path`; None if they are not called one after the
    other, once each."""
    names = [block_name(path, i) for i in range(count)]
    visits = [recording.visits.get(name, []) for name in names]
    if any(len(each) != 1 for each in visits):
        return None
    calls = [each[0] for each in visits]
    if any(a.stop > b.start for a, b in pairwise(calls)):
        return None
    forward = (*(range(a.start, b.start) for a, b in pairwise(calls)), calls[-1])
    marks = [recording.entered.get(name) for name in names]
    trained = [i for i, mark in enumerate(marks) if mark is not None]
    if not trained:
        end = len(recording.kinds)
        return Spans(forward, (range(end, end),) * count) if end == recording.forward else None
    begun = [mark for mark in marks[trained[0] :] if mark is not None]
    if trained != list(range(trained[0], count)) or begun != sorted(begun, reverse=True):
        return None
    known = [range(later, earlier) for earlier, later in pairwise(begun)]
    return Spans(forward, (*(None,) * (trained[0] + 1), *known))


def proposals(recording: Recording, path: str, count: int) -> list[BlockRun]:
    """The possible runs of the list at `path`, judged by kinds alone. Runs that leave out most
    blocks come first."""
    where = spans(recording, path, count)
    if where is None:
        return []
    kinds: list[Hashable] = [
        None if back is None else (_kinds(recording, ahead), _kinds(recording, back))
        for ahead, back in zip(where.forward, where.backward, strict=True)
    ]
    runs: list[BlockRun] = []
    for period in range(1, min(MAX_PERIOD, count - 2) + 1):
        head = count - 1 - period
        while head > 1 and kinds[head - 1] == kinds[head - 1 + period] is not None:
            head -= 1
        head += (count - 1 - head) % period
        run = BlockRun(path, count, head, period)
        if run.extra * period >= MIN_LEFT_OUT:
            runs.append(run)
    return sorted(runs, key=lambda run: len(run.kept))


def _kinds(recording: Recording, ops: range) -> tuple[int, ...]:
    return tuple(recording.kinds[ops.start : ops.stop])


class Stream:
    """A recording under names that are the same in the whole and in the short model. `items` has
    the ops and states of each repeating block, and under `REST` all others."""

    REST: ClassVar[Owner] = (-1, 0)

    def __init__(
        self,
        recording: Recording,
        runs: Sequence[BlockRun],
        states: Mapping[str, Hashable],
        kinds: Kinds,
        *,
        short: bool,
    ) -> None:
        self.runs = runs
        self.short = short
        self.items: dict[Owner, list[_Item]] = {self.REST: []}
        self._place: list[tuple[Owner, int]] = []
        self._names: dict[str, Hashable] = {}
        owners = [self.REST] * len(recording.kinds)
        for r, run in enumerate(runs):
            numbers = run.kept if short else range(run.count)
            where = spans(recording, run.path, len(numbers))
            if where is None:
                raise ValueError(f"blocks of {run.path} are not called one after the other")
            for i, m in enumerate(numbers):
                if run.head <= m < run.count - 1:
                    self.items[r, m] = []
                    for op in (*where.forward[i], *(where.backward[i] or ())):
                        owners[op] = r, m
        for owner, kind, reads in zip(owners, recording.kinds, recording.reads, strict=True):
            self._place.append((owner, len(self.items[owner])))
            self.items[owner].append((kind, reads))
        for name, form in states.items():
            owner, rest = self._owner(name)
            grad = recording.results.get(f"grad {name}")
            kind = kinds.setdefault(("state", rest, form, grad is None), len(kinds))
            self.items[owner].append((kind, () if grad is None else (grad,)))
        for name, value in recording.results.items():
            if value is not None and name.startswith("output "):
                kind = kinds.setdefault(("result", name), len(kinds))
                self.items[self.REST].append((kind, (value,)))

    def _owner(self, name: str) -> tuple[Owner, str]:
        """The block that holds a state, and the state's name there, or its name in the model."""
        for r, run in enumerate(self.runs):
            at = run.split(name)
            if at is not None:
                m = run.kept[at[0]] if self.short else at[0]
                if run.head <= m < run.count - 1:
                    return (r, m), at[1]
                return self.REST, run.join(m, at[1])
        return self.REST, name

    def seen_from(self, owner: Owner, value: Recorded) -> Hashable:
        """The name of `value` as seen from a block, relative to it for values of nearby blocks.
        None, which equals no name, for a value of a left-out block that is further away."""
        holder, at = self._owner(value.name) if value.op < 0 else self._place[value.op]
        if holder == self.REST:
            return self.REST, at, value.output
        run = self.runs[holder[0]]
        if holder[0] == owner[0]:
            distance = self._local(holder) - self._local(owner)
            if abs(distance) <= run.period:
                return distance, at, value.output
        if holder[1] in run.first or holder[1] in run.last:
            return holder, at, value.output
        return None

    def _local(self, owner: Owner) -> int:
        run, number = self.runs[owner[0]], owner[1]
        left_out = run.extra * run.period
        return number - left_out if self.short and number in run.last else number

    def named(self, owner: Owner) -> Iterator[tuple[int, list[Hashable]]]:
        """The items of a block, with what they read as seen from it."""
        return (
            (kind, [self.seen_from(owner, value) for value in reads])
            for kind, reads in self.items[owner]
        )


def repeats(stream: Stream) -> bool:
    """Whether every block between the first and the last period of the stream's one run is like
    these. It must read of earlier blocks what the last period reads, of later ones what the first
    reads, and otherwise what both read."""
    (run,) = stream.runs
    firsts = [list(stream.named((0, m))) for m in run.first]
    lasts = [list(stream.named((0, m))) for m in run.last]
    for m in range(run.first.stop, run.last.start):
        k = (m - run.head) % run.period
        block = list(stream.named((0, m)))
        if not len(block) == len(firsts[k]) == len(lasts[k]):
            return False
        for here, first, last in zip(block, firsts[k], lasts[k], strict=True):
            is_alike = here[0] == first[0] == last[0]
            is_alike = is_alike and len(here[1]) == len(first[1]) == len(last[1])
            if not (is_alike and all(map(_follows, here[1], first[1], last[1]))):
                return False
    return True


def _follows(here: Hashable, first: Hashable, last: Hashable) -> bool:
    if here is None:
        return False
    distance = here[0] if isinstance(here, tuple) else 0
    if isinstance(distance, int) and distance:
        return here == (last if distance < 0 else first)
    return here == first == last


def same_around(whole: Stream, short: Stream) -> bool:
    """Whether the short model's blocks have the same items in the whole model."""
    return all(
        None not in (name for _, names in there for name in names) and there == here
        for there, here in (
            (list(whole.named(owner)), list(short.named(owner))) for owner in short.items
        )
    )


def find_runs(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    selects: OutputFilter,
    watch: Watch,
) -> tuple[BlockRun, ...]:
    """The runs of `model(*args, **kwargs)`: none where blocks differ, or where the step cannot be
    recorded. The model is left as it was."""
    lists = dict(block_lists(model))
    if not lists:
        return ()
    kinds: Kinds = {}
    record_once = partial(_recorded, model, args, kwargs, kinds, selects, watch)
    whole = _unless_it_raises(partial(record_once, lists), watch)
    if whole is None:
        return ()
    recording, states = whole
    runs = tuple(_chosen(recording, states, lists, kinds))
    if not runs:
        return ()
    with watch.of_short_model(), shortened(model, runs):
        kept = {run.path: [lists[run.path][m] for m in run.kept] for run in runs}
        rest = _unless_it_raises(partial(record_once, kept), watch)
    if rest is None:
        return ()
    there = Stream(recording, runs, states, kinds, short=False)
    return runs if same_around(there, Stream(rest[0], runs, rest[1], kinds, short=True)) else ()


def _chosen(
    recording: Recording,
    states: Mapping[str, Hashable],
    lists: Mapping[str, Sequence[nn.Module]],
    kinds: Kinds,
) -> Iterator[BlockRun]:
    """The runs, none within another."""
    taken: list[str] = []
    for path, blocks in lists.items():
        if any(path.startswith(outer) for outer in taken):
            continue
        for run in proposals(recording, path, len(blocks)):
            if repeats(Stream(recording, (run,), states, kinds, short=False)):
                taken.append(run.prefix)
                yield run
                break


_Recorded = tuple[Recording, dict[str, Hashable]]


def _unless_it_raises(record_once: Callable[[], _Recorded], watch: Watch) -> _Recorded | None:
    """A recording; None if the model raises."""
    for _ in range(MOST_TRACES):
        known = watch.discoveries
        try:
            return record_once()
        except Exception:  # whatever the model raises here, it is traced whole
            # A tensor of the script's, which now has a stand-in, is not on the meta device.
            if watch.discoveries == known:
                return None
    return None


def _recorded(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kinds: Kinds,
    selects: OutputFilter,
    watch: Watch,
    lists: Mapping[str, Sequence[nn.Module]],
) -> _Recorded:
    """A recording, and the type, shape, strides and dtype of each parameter and buffer."""
    leaves, spec = torch_private.tree_flatten((args, kwargs))
    blocks = {block: block_name(path, i) for path in lists for i, block in enumerate(lists[path])}
    with warnings.catch_warnings(), torch_private.compiling():
        warnings.simplefilter("ignore")
        with staged(model, leaves, spec, meta_tensor, {}, selects, watch) as (step, tensors):
            states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            states |= dict(step.named_buffers(recurse=False))
            recording = record(step, tensors, states, blocks, kinds)
    forms: dict[str, Hashable] = {
        name: (type(x), tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
        for name, x in states.items()
    }
    return recording, forms
