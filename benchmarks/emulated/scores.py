"""How good the chosen plans were, and how true the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median

from benchmarks.emulated.outcome import CHOSEN, Entry, Outcome
from benchmarks.published.scores import errors, spearman


def ratio(one: Entry, other: Entry) -> float:
    """How much longer the steps of `one` take: the median over the rounds, in each of which both
    met the same; one that was far behind was left after the first."""
    pairs = zip(one.step_ms, other.step_ms, strict=False)
    return median(mine / theirs for mine, theirs in pairs)


def fastest(outcome: Outcome) -> Entry:
    """That of the shortest median step, the first of equal ones."""
    return min(outcome.entries, key=lambda entry: entry.median_ms)


def behind(outcome: Outcome) -> float:
    """How many times longer the chosen plan's steps take than those of the fastest."""
    return ratio(outcome.entry(CHOSEN), fastest(outcome))


def rivals(outcomes: Sequence[Outcome]) -> Mapping[str, tuple[int, float]]:
    """Of each other way: in how many scenarios it could be run, and the geometric mean of how many
    times longer its steps take there than the chosen plan's."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        chosen = outcome.entry(CHOSEN)
        for name in (*(entry.name for entry in outcome.entries), *outcome.alike):
            if name != CHOSEN:
                found.setdefault(name, []).append(ratio(outcome.entry(name), chosen))
    return {name: (len(all_), geometric_mean(all_)) for name, all_ in found.items()}


def predicted(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """(predicted, measured) milliseconds of all that was predicted."""
    return [
        (entry.predicted_ms, entry.median_ms)
        for outcome in outcomes
        for entry in outcome.entries
        if entry.predicted_ms is not None
    ]


def median_error(outcomes: Sequence[Outcome]) -> float:
    """The median of |predicted / measured - 1|."""
    said, seen = zip(*predicted(outcomes), strict=True)
    return median(errors(said, seen).tolist())


def rank_correlation(outcomes: Sequence[Outcome]) -> float | None:
    """Spearman's, of predicted and measured steps; None where fewer than two were predicted."""
    pairs = predicted(outcomes)
    return spearman(*zip(*pairs, strict=True)) if len(pairs) > 1 else None
