"""Whole numbers in proportion."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts, in proportion to `weights`, that add up to it: each is rounded down,
    and what is left goes by ones to those that lost most, of equals to the first (the method of
    Hamilton, or of largest remainders). All 0 where the weights are."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    quotas = [divmod(total * weight, whole) for weight in weights]
    parts = [int(part) for part, _ in quotas]
    lost = sorted(range(len(parts)), key=lambda k: -quotas[k][1])
    for k in lost[: max(0, total - sum(parts))]:
        parts[k] += 1
    return parts
