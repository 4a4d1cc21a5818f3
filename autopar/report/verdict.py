"""Whether a difference counts: by default any, with `--fail-over` what has grown by too much."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.errors import AutoparError
from autopar.report.bill import MEMORY, OWN_WORDS, TIME, Figure
from autopar.report.changes import Cause
from autopar.report.difference import Difference
from autopar.report.requested import TOLERANCE_PERCENT

SAME, DIFFERENT = 0, 2
"""Exit statuses."""

STRUCTURE, MODEL = "structure", "model"

FIGURES = {
    "time": (TIME, "step"),
    "compute": (TIME, "compute"),
    "communication": (TIME, "communication"),
    "exposed": (TIME, "exposed communication"),
    "optimizer": (TIME, "optimizer"),
    "memory": (MEMORY, "peak"),
}
"""What `--fail-over` can bound: section and name of the figure in the bill."""

_SHOWN = 6
_BOUND = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*%", re.ASCII)
_EXAMPLE = "write it as in time=2%,memory=1% or time=2%,structure"


@dataclass(frozen=True, slots=True)
class Bounds:
    """By how much figures may grow, in percent of what they were, and whether all changes of the
    model, or of the structure (model, request and decisions), count."""

    percent: tuple[tuple[str, Fraction], ...]
    model: bool = False
    structure: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status` is SAME or DIFFERENT; `reasons` are sentences on what of the difference counts."""

    status: int
    reasons: tuple[str, ...]
    difference: Difference

    def __str__(self) -> str:
        from autopar.report.difference_text import page
        from autopar.report.plain import plain

        return plain(page(self))

    def _repr_markdown_(self) -> str:
        from autopar.report.difference_markdown import markdown

        return markdown(self, self.difference.new.model)


def parse_bounds(text: str) -> Bounds:
    """Bounds of `time=2%,memory=1%,structure`. AutoparError says which part cannot be read."""
    percent: dict[str, Fraction] = {}
    flags: set[str] = set()
    for part in (part.strip() for part in text.split(",")):
        key, equals, bound = (piece.strip() for piece in part.partition("="))
        if key in percent or key in flags:
            raise AutoparError(f"fail-over: {key} is there twice")
        if key in (STRUCTURE, MODEL) and not equals:
            flags.add(key)
            continue
        match = _BOUND.fullmatch(bound)
        if key not in FIGURES or match is None:
            known = ", ".join([*(f"{name}=N%" for name in FIGURES), STRUCTURE, MODEL])
            raise AutoparError(f"fail-over: cannot read {part!r}: {_EXAMPLE} (there are {known})")
        percent[key] = Fraction(match[1])
    return Bounds(tuple(percent.items()), MODEL in flags, STRUCTURE in flags)


def judge(difference: Difference, bounds: Bounds | None = None) -> Verdict:
    """Without bounds, all of the structure counts, and figures that moved by more than
    `TOLERANCE_PERCENT` of the old step or the old peak; with bounds, only what they name."""
    if bounds is None:
        reasons = (*_topics(difference, structure=True), *_moved(difference))
    else:
        reasons = (
            *_topics(difference, structure=bounds.structure, model=bounds.model),
            *_grown(difference, bounds),
        )
    return Verdict(DIFFERENT if reasons else SAME, reasons, difference)


_CAUSES: dict[Cause, str] = {
    "model": "the model changed",
    "request": "what it is planned for changed",
    "decision": "decisions changed",
}


def _topics(
    difference: Difference, *, structure: bool = False, model: bool = False
) -> tuple[str, ...]:
    reasons: list[str] = []
    for cause, words in _CAUSES.items():
        titles = [topic.title for topic in difference.with_cause(cause)]
        if titles and (structure or (model and cause == "model")):
            reasons.append(f"{words} ({', '.join(titles)})")
    return tuple(reasons)


def _moved(difference: Difference) -> tuple[str, ...]:
    """Names of figures, or of sections whose names of figures come from the plans."""
    names = dict.fromkeys(
        figure.name if figure.section in OWN_WORDS else figure.section
        for figure in difference.bill
        if figure.whole is not None
        and 100 * abs((figure.after or 0) - (figure.before or 0)) > TOLERANCE_PERCENT * figure.whole
    )
    return (f"estimates moved ({_list(list(names))})",) if names else ()


def _list(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _grown(difference: Difference, bounds: Bounds) -> tuple[str, ...]:
    found: dict[tuple[str, str], Figure] = {(f.section, f.name): f for f in difference.bill}
    reasons: list[str] = []
    for key, percent in bounds.percent:
        figure = found[FIGURES[key]]
        before, after = figure.before or 0, figure.after or 0
        if 100 * (after - before) > percent * before:
            by = f"{figure.change_percent:.3g} %" if before else "what was 0"
            reasons.append(f"{key} grew by {by}, more than {float(percent):g} %")
    return tuple(reasons)
