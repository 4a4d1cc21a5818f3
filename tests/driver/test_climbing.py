"""The search along a line."""

from __future__ import annotations

from autopar.driver.climbing import climb


def tried(costs: list[int], start: int) -> list[int]:
    """The places that are tried, where a place improves that costs less than all before."""
    found: list[int] = []

    def improves(place: int) -> bool:
        is_better = all(costs[place] < costs[other] for other in found)
        found.append(place)
        return is_better

    climb(len(costs), start, improves)
    return found


def test_each_way_ends_where_nothing_is_better() -> None:
    assert tried([9, 3, 5, 6, 4, 1], 2) == [2, 3, 1, 0]


def test_the_other_way_is_not_tried_where_one_is_better() -> None:
    assert tried([9, 3, 5, 4, 6, 1], 2) == [2, 3, 4]
    # All that is there in one way may not fit in memory.
    assert tried([2, 9, 8, 7], 1) == [1, 2, 3, 0]
    assert tried([1, 2, 3, 4], 3) == [3, 2, 1, 0]
    assert tried([7], 0) == [0]
