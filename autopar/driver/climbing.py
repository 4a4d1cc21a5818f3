"""The search along a line, from a place that may be good: what takes little to try is not all tried
where each try takes seconds."""

from __future__ import annotations

from collections.abc import Callable


def climb(size: int, start: int, improves: Callable[[int], bool]) -> None:
    """Tries places from `start` on, of `size` in a line: upwards and then downwards, each way until
    one does not improve on what was found before, as `improves` says that tries it."""
    if size:
        improves(start)
    for places in (range(start + 1, size), range(start - 1, -1, -1)):
        for place in places:
            if not improves(place):
                break
