"""How far predictions are from what was measured, and what a constant would have said."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from autopar.cluster.devices import DEVICES
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
    reach the median share of its device's bfloat16 peak that all *other* runs on that device do.
    None where there is no other."""
    shares = [run.tokens_s_gpu * run.flops_per_token / _peak(run) for run in runs]
    found: list[float | None] = []
    for k, run in enumerate(runs):
        others = [
            share
            for j, (other, share) in enumerate(zip(runs, shares, strict=True))
            if j != k and other.preset == run.preset
        ]
        share = float(np.median(others)) if others else None
        found.append(None if share is None else share * _peak(run) / run.flops_per_token)
    return found


def _peak(run: Run) -> float:
    if run.preset is None:
        raise ValueError(f"{run.name}: no preset for {run.gpu}")
    return DEVICES[run.preset].peak("bfloat16")


def grouped(items: Sequence[Item], key: Callable[[Item], Key]) -> Mapping[Key, list[Item]]:
    """The items by key, in order of appearance."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
