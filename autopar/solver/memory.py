"""Which nodes are live together, and what a memory limit that cannot be met comes down to."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.problem import Conflict, Problem

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
    worst: Conflict | None = None
    for time, nodes in live_sets(problem):
        needed = sum(least[i] for i in nodes)
        if needed > problem.usage_limit and (worst is None or needed > worst.needed):
            worst = _conflict(problem, time, needed, nodes, least)
    return worst


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
