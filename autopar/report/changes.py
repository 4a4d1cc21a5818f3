"""Nouns of a comparison of plans: changes, and topics of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.ir.grouping import grouped
from autopar.ir.patterns import compress
from autopar.plans.requests.matching import general

Cause = Literal["model", "request", "decision"]
"""Whether the model, the request or a decision of the planner changed."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference, or `count` equal ones; a text is empty if its plan lacks the thing. Names are
    as in the plans: printing must escape them."""

    what: str
    count: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Topic:
    """Changes of one kind, those that weigh most first."""

    title: str
    cause: Cause
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class ChangeItem:
    """One name whose `before` and `after` differ. Items of one `place` are joined if all else is
    equal. Those with a larger `weight` (nanoseconds or bytes) come first."""

    place: str
    name: str
    before: str
    after: str
    weight: int = 0


def folded(items: Iterable[ChangeItem]) -> tuple[Change, ...]:
    """Dotted names of one pattern as one change: `layers.{0-3}.mlp.weight`."""
    classes = grouped(((general(item.name), item.before, item.after), item) for item in items)
    return _weightiest_first(
        (", ".join(compress(item.name for item in alike)), alike) for alike in classes.values()
    )


def gathered(items: Iterable[ChangeItem]) -> tuple[Change, ...]:
    """Items of one place and of equal text as one change: `mlp forward: gelu.0, mm.0`."""
    classes = grouped(((item.place, item.before, item.after), item) for item in items)
    return _weightiest_first(
        (": ".join(filter(None, (place, ", ".join(sorted({i.name for i in alike}))))), alike)
        for (place, _, _), alike in classes.items()
    )


def single(what: str, before: str, after: str) -> tuple[Change, ...]:
    """A change, if there is one."""
    return (Change(what, 1, before, after),) if before != after else ()


def _weightiest_first(changes: Iterable[tuple[str, list[ChangeItem]]]) -> tuple[Change, ...]:
    weighed = sorted(changes, key=lambda pair: (-sum(item.weight for item in pair[1]), pair[0]))
    return tuple(
        Change(what, len(alike), alike[0].before, alike[0].after) for what, alike in weighed
    )
