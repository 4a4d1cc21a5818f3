"""Usages that are live together, and the conflict if a memory limit cannot be met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from autopar.ir.grouping import grouped
from autopar.ir.problem import Conflict, IntArray, Problem, Usage

_NUM_NAMED = 5

NodeUsage = tuple[int, IntArray]
"""A node, and its bytes at some time under each of its choices."""


def live_sets(problem: Problem) -> list[tuple[int, tuple[NodeUsage, ...]]]:
    """The times at which the set of usages is maximal, with that set in order of the nodes.

    A set can only be maximal between a time when a usage begins and the next one when a usage ends.
    Every other set is a subset of such a set, whose limit implies its own.
    """
    starts = grouped((usage.start, (node, at)) for node, at, usage in _lasting(problem))
    stops = grouped((usage.stop, (node, at)) for node, at, usage in _lasting(problem))
    live: set[tuple[int, int]] = set()
    sets: list[tuple[int, tuple[NodeUsage, ...]]] = []
    newest: int | None = None
    for time in sorted(starts.keys() | stops.keys()):
        if time in stops and newest is not None:
            usages = ((i, problem.usages[i][place].amounts) for i, place in sorted(live))
            sets.append((newest, tuple(usages)))
            newest = None
        live.difference_update(stops.get(time, ()))
        if time in starts:
            live.update(starts[time])
            newest = time
    return sets


def usages_at(problem: Problem, time: int) -> Iterator[NodeUsage]:
    """The usages at a time."""
    there = (each for each in _lasting(problem) if each[2].start <= time < each[2].stop)
    return ((node, usage.amounts) for node, _, usage in there)


def total_usages(problem: Problem) -> list[IntArray]:
    """Per node, the bytes of each of its choices, all usages added up."""
    return [
        sum((usage.amounts for usage in usages), start=np.zeros(len(costs), np.int64))
        for usages, costs in zip(problem.usages, problem.costs, strict=True)
    ]


def least_usage_conflict(problem: Problem) -> Conflict | None:
    """The worst time at which even the smallest choices exceed the limit, or None."""
    if problem.usage_limit is None:
        return None
    times = maximal_times(problem)
    needed = usage_sums(problem, times, lambda amounts: int(amounts.min()))
    missing = [used - problem.limit_at(t) for used, t in zip(needed, times.tolist(), strict=True)]
    worst = max(range(len(needed)), key=missing.__getitem__, default=None)
    if worst is None or missing[worst] <= 0:
        return None
    time = int(times[worst])
    used = [(node, int(amounts.min())) for node, amounts in usages_at(problem, time)]
    return _conflict(problem, time, needed[worst], used)


def usage_sums(problem: Problem, times: IntArray, taken: Callable[[IntArray], int]) -> list[int]:
    """Bytes in use at each of `times`, where every usage is `taken` of its amounts."""
    change = [0] * (len(times) + 1)
    places: list[list[int]] = np.searchsorted(times, _spans(problem)).tolist()
    for (start, stop), (_, _, usage) in zip(places, _lasting(problem), strict=True):
        amount = taken(usage.amounts)
        change[start] += amount
        change[stop] -= amount
    return list(accumulate(change))[:-1]


def maximal_times(problem: Problem) -> IntArray:
    """The times at which a maximal set of usages is live, ascending; none without a limit."""
    if problem.usage_limit is None:
        return np.empty(0, dtype=np.int64)
    starts, stops = map(np.unique, _spans(problem).T)
    following = np.searchsorted(starts, stops, side="left")
    # The newest start before a stop; a start that another one follows first is not maximal.
    return starts[np.unique(following[following > 0] - 1)]


def _spans(problem: Problem) -> IntArray:
    """Start and stop of each usage that lasts for any time."""
    spans = [(usage.start, usage.stop) for _, _, usage in _lasting(problem)]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def peak_conflict(problem: Problem, choice: Sequence[int], time: int, needed: int) -> Conflict:
    """The conflict of a problem whose smallest possible peak is `needed`, reached at `time` by
    `choice`."""
    used = [(node, int(amounts[choice[node]])) for node, amounts in usages_at(problem, time)]
    return _conflict(problem, time, needed, used)


def _lasting(problem: Problem) -> Iterator[tuple[int, int, Usage]]:
    """Node, place among its usages, and usage, of all that last for any time."""
    return (
        (node, place, usage)
        for node, usages in enumerate(problem.usages)
        for place, usage in enumerate(usages)
        if usage.start < usage.stop
    )


def _conflict(
    problem: Problem, time: int, needed: int, used: Sequence[tuple[int, int]]
) -> Conflict:
    largest = sorted(used, key=lambda each: (-each[1], problem.keys[each[0]]))[:_NUM_NAMED]
    named = tuple((problem.keys[node], size) for node, size in largest)
    return Conflict(time, needed, problem.limit_at(time), named)
