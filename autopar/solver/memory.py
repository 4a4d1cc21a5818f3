"""Which nodes are live together, and what a memory limit that cannot be met comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from autopar.ir.problem import Conflict, IntArray, Problem

_NUM_NAMED = 5


def live_sets(problem: Problem) -> list[tuple[int, tuple[int, ...]]]:
    """The times at which the set of live nodes is maximal, with that set in ascending order.

    A set can only be maximal at a time when a node becomes live and just before one ceases to be:
    every other set is part of such a one, and its limit follows from the other's.
    """
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for node, (start, stop) in enumerate(problem.intervals):
        if start < stop:
            starts.setdefault(start, []).append(node)
            stops.setdefault(stop, []).append(node)
    live: set[int] = set()
    found: list[tuple[int, tuple[int, ...]]] = []
    newest: int | None = None
    for time in sorted(starts.keys() | stops.keys()):
        if time in stops and newest is not None:
            found.append((newest, tuple(sorted(live))))
            newest = None
        live.difference_update(stops.get(time, ()))
        if time in starts:
            live.update(starts[time])
            newest = time
    return found


def least_usage_conflict(problem: Problem) -> Conflict | None:
    """The worst time at which even the smallest choices exceed the limit; None if there is none."""
    if problem.usage_limit is None:
        return None
    least = [int(usages.min()) for usages in problem.usages]
    times = maximal_times(problem)
    spans = np.searchsorted(times, np.array(problem.intervals, dtype=np.int64).reshape(-1, 2))
    change = [0] * (len(times) + 1)
    for used, (start, stop) in zip(least, spans.tolist(), strict=True):
        if start < stop:
            change[start] += used
            change[stop] -= used
    needed = list(accumulate(change))[:-1]
    worst = max(range(len(needed)), key=needed.__getitem__, default=None)
    if worst is None or needed[worst] <= problem.usage_limit:
        return None
    time = int(times[worst])
    live = [i for i, (start, stop) in enumerate(problem.intervals) if start <= time < stop]
    return _conflict(problem, time, needed[worst], live, least)


def maximal_times(problem: Problem) -> IntArray:
    """The times at which a maximal set of nodes is live, ascending; none without a limit."""
    if problem.usage_limit is None:
        return np.empty(0, dtype=np.int64)
    spans = np.array([s for s in problem.intervals if s[0] < s[1]], dtype=np.int64).reshape(-1, 2)
    starts, stops = np.unique(spans[:, 0]), np.unique(spans[:, 1])
    following = np.searchsorted(starts, stops, side="left")
    # The newest start before a stop; a start that another one follows first is not maximal.
    return starts[np.unique(following[following > 0] - 1)]


def peak_conflict(problem: Problem, choice: Sequence[int], time: int, needed: int) -> Conflict:
    """The conflict of a problem whose smallest possible peak is `needed`, reached at `time` by
    `choice`."""
    used = [int(usages[c]) for usages, c in zip(problem.usages, choice, strict=True)]
    live = [i for i, (start, stop) in enumerate(problem.intervals) if start <= time < stop]
    return _conflict(problem, time, needed, live, used)


def _conflict(
    problem: Problem, time: int, needed: int, live: Sequence[int], used: Sequence[int]
) -> Conflict:
    assert problem.usage_limit is not None
    largest = sorted(live, key=lambda i: (-used[i], problem.keys[i]))[:_NUM_NAMED]
    named = tuple((problem.keys[i], used[i]) for i in largest)
    return Conflict(time, needed, problem.usage_limit, named)
