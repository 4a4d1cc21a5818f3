"""The search along a line, from a place that may be good: what takes little to try is not all tried
where each try takes seconds."""

from __future__ import annotations

from collections.abc import Callable


def climb(size: int, start: int, improves: Callable[[int], bool]) -> None:
    """Tries places from `start` on, of `size` in a line: upwards, until one does not improve on
    what was found before, as `improves` says that tries it; and downwards in the same way, unless
    upwards some did: the best of a line is thought to be between what is worse."""
    if size:
        improves(start)
    for places in (range(start + 1, size), range(start - 1, -1, -1)):
        for passed, place in enumerate(places):
            if not improves(place):
                if passed:
                    return
                break
