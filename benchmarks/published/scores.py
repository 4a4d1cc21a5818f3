"""How far predictions are from what was measured, and what a constant would have said."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.published.runs import Run

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def errors(predicted: Sequence[float], measured: Sequence[float]) -> np.ndarray:
    """|predicted / measured - 1| of each."""
    return np.abs(np.asarray(predicted) / np.asarray(measured) - 1)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; not a number where all
    values of a side are equal. ValueError unless both have the same length, 2 or more."""
    if len(one) != len(other) or len(one) < 2:
        raise ValueError(f"no ranks of {len(one)} and {len(other)} values can be compared")
    first, second = _centred_ranks(one), _centred_ranks(other)
    spread = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / spread if spread else float("nan")


def _centred_ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[place]
    return ranks - ranks.mean()


def constant_utilisation(runs: Sequence[Run]) -> list[float | None]:
    """Tokens per second and device by the rival that knows nothing but FLOPs: each run is taken to
    do the median of the FLOP/s that all *other* runs on that device do; those of workloads, which
    are another trainer's, are a device of their own. None where there is no other."""
    rates = [run.tokens_s_gpu * run.flops_per_token for run in runs]
    places = grouped(range(len(runs)), lambda k: (runs[k].preset, runs[k].workload is None))
    found: list[float | None] = [None] * len(runs)
    for members in places.values():
        if len(members) > 1:
            for k in members:
                others = [rates[j] for j in members if j != k]
                found[k] = float(np.median(others)) / runs[k].flops_per_token
    return found


def regret(speeds: Sequence[float], measured: Sequence[float]) -> float:
    """How much faster the fastest `measured` is than that of the highest of `speeds`, the first of
    equal ones: what it costs to believe in `speeds`, as a part of the step."""
    return max(measured) / measured[int(np.argmax(speeds))] - 1


def rule_of_thumb(runs: Sequence[Run]) -> list[float]:
    """Speeds, in no unit, by the rule that takes most data parallelism, then least tensor
    parallelism, then the largest microbatch."""
    order = sorted({_preference(run) for run in runs})
    return [float(order.index(_preference(run))) for run in runs]


def _preference(run: Run) -> tuple[int, int, int]:
    return run.dp, -run.tp, run.microbatch


def grouped(items: Sequence[Item], key: Callable[[Item], Key]) -> Mapping[Key, list[Item]]:
    """The items by key, in order of appearance."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
