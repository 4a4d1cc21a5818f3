"""Whether a difference counts: by default any, with `--fail-over` what has grown by too much. The
verdict is a page for a terminal, or Markdown for a comment on a pull request that is updated in
place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.errors import AutoparError, listed
from autopar.ir.units import format_bytes, format_ns, format_share
from autopar.report.changes import Cause, Change, Topic
from autopar.report.cost_comparison import (
    MEMORY,
    OWN_WORDS,
    TIME,
    Figure,
    Unit,
    change_text,
    value_text,
)
from autopar.report.difference import Difference, Side
from autopar.report.names import clean
from autopar.report.printed import (
    Printed,
    as_text,
    code,
    details,
    fitted,
    markdown_table,
    section,
    with_rest,
)
from autopar.report.printed import table as new_table
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
    "host": (TIME, "waiting for the host"),
    "memory": (MEMORY, "peak"),
}
"""What `--fail-over` can bound: section and name of the figure in the cost breakdown."""

_SHOWN = 6
_MAX_ROWS = 30
"""Changes of a topic that are printed; a last line counts the rest."""

CAUSES: dict[Cause, tuple[str, str]] = {
    "model": ("The model", "the model changed"),
    "request": ("What it is planned for", "what it is planned for changed"),
    "decision": ("Decided otherwise", "decisions changed"),
}
"""By cause of changes, their title, and that there are some."""

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
class Verdict(Printed):
    """`status` is SAME or DIFFERENT; `reasons` are sentences on what of the difference counts."""

    status: int
    reasons: tuple[str, ...]
    difference: Difference

    def page(self) -> RenderableType:
        """What counts, what changed by cause, and the cost breakdown."""
        difference = self.difference
        sections: list[RenderableType] = [_head(self)]
        for cause, (title, _) in CAUSES.items():
            for topic in difference.with_cause(cause):
                sections += section(f"{title}: {clean(topic.title)}", _change_rows(topic))
        shown = difference.cost_rows()
        if shown:
            sections += section("Cost breakdown, per device and step", _cost_rows(shown))
        sections += [Text("")] * bool(difference.notes)
        sections += [Text("note: ", "yellow").append(clean(n), "default") for n in difference.notes]
        return Group(*sections)


def parse_bounds(text: str) -> Bounds:
    """Bounds of `time=2%,memory=1%,structure`. AutoparError says which part cannot be read."""
    percent: dict[str, Fraction] = {}
    flags: set[str] = set()
    for part in map(str.strip, text.split(",")):
        key, equals, bound = map(str.strip, part.partition("="))
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


def _topics(
    difference: Difference, *, structure: bool = False, model: bool = False
) -> Iterator[str]:
    for cause, (_, words) in CAUSES.items():
        titles = [topic.title for topic in difference.with_cause(cause)]
        if titles and (structure or (model and cause == "model")):
            yield f"{words} ({', '.join(titles)})"


def _moved(difference: Difference) -> tuple[str, ...]:
    """Names of figures, or of sections whose names of figures come from the plans."""
    names = dict.fromkeys(
        figure.name if figure.section in OWN_WORDS else figure.section
        for figure in difference.costs
        if figure.whole is not None
        and 100 * abs((figure.after or 0) - (figure.before or 0)) > TOLERANCE_PERCENT * figure.whole
    )
    return (f"estimates moved ({listed(names, _SHOWN)})",) if names else ()


def _grown(difference: Difference, bounds: Bounds) -> Iterator[str]:
    figures: dict[tuple[str, str], Figure] = {(f.section, f.name): f for f in difference.costs}
    for key, percent in bounds.percent:
        figure = figures[FIGURES[key]]
        before, after = figure.before or 0, figure.after or 0
        if 100 * (after - before) > percent * before:
            by = f"{figure.change_percent:.3g} %" if before else "what was 0"
            yield f"{key} grew by {by}, more than {float(percent):g} %"


def verdict_line(verdict: Verdict) -> str:
    """`same`, or what counts."""
    if verdict.status != SAME:
        return f"different: {'; '.join(map(clean, verdict.reasons))}"
    return "different, but in nothing that counts" if verdict.difference.differs else "same"


def _head(verdict: Verdict) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    style = "green" if verdict.status == SAME else "red"
    grid.add_row("plans", Text(verdict_line(verdict), style))
    for name, side in (("old", verdict.difference.old), ("new", verdict.difference.new)):
        grid.add_row(name, Text(clean(_side(side))))
    return grid


def _side(side: Side) -> str:
    return (
        f"{side.model or '(unnamed)'} on {side.cluster}, {side.mesh}: step "
        f"{format_ns(side.step_ns)}, {format_bytes(side.memory_bytes)} of "
        f"{format_bytes(side.memory_limit_bytes)}; plan {side.digest[:12]}"
    )


def _change_rows(topic: Topic) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=2)
    table.add_column(overflow="fold", ratio=3)
    for change in topic.changes[:_MAX_ROWS]:
        table.add_row(*_row(change))
    return with_rest(table, len(topic.changes), _MAX_ROWS)


def _row(change: Change) -> Iterator[Text]:
    added, gone = not change.before, not change.after
    yield Text("+", "green") if added else Text("-", "red") if gone else Text("~", "yellow")
    yield Text(clean(change.what) + (f" ({change.count})" if change.count > 1 else ""))
    text = Text(clean(change.before), "red")
    if not (added or gone):
        text.append(" -> ", "default")
    yield text.append(clean(change.after), "green")


def _cost_rows(figures: Sequence[Figure]) -> RenderableType:
    table = new_table(("",), ("before", "after", "change"))
    title = ""
    for figure in figures:
        if figure.section != title:
            title = figure.section
            table.add_row(Text(title, "dim"))
        table.add_row(
            Text(f"  {clean(figure.name)}"),
            value_text(figure.before, figure.unit),
            value_text(figure.after, figure.unit),
            change_text(figure),
            style="bold" if figure.name in ("step", "peak") else "",
        )
    return table


def markdown(verdict: Verdict, name: str) -> str:
    """The whole comment. A comment with the same first line is an older one on the same `name`."""
    return fitted(
        [f"<!-- autopar-diff:v1:{marked(name)} -->", verdict_headline(verdict), *parts(verdict)]
    )


def marked(name: str) -> str:
    """`name` as it can stand in an HTML comment."""
    return "".join(c if c.isalnum() or c in "/._ " else "_" for c in name)[:100]


def verdict_headline(verdict: Verdict) -> str:
    """The verdict in one line, with step, peak and exposed communication."""
    old, new = verdict.difference.old, verdict.difference.new
    word = "Nothing that counts changed" if verdict.difference.differs else "Same plan"
    word = word if verdict.status == SAME else "**The plan changed**"
    steps = _change(old.step_ns, new.step_ns, "ns")
    peaks = _change(old.memory_bytes, new.memory_bytes, "bytes")
    limit = value_text(new.memory_limit_bytes, "bytes")
    full = format_share(new.memory_bytes, new.memory_limit_bytes)
    shares = [format_share(s.exposed_communication_ns, s.step_ns) for s in (old, new)]
    sent = " → ".join(dict.fromkeys(shares))
    return f"{word}: step {steps}, peak {peaks} of {limit} ({full}), exposed communication {sent}"


def parts(verdict: Verdict) -> Iterator[str]:
    """What follows the headline: reasons, the cost breakdown, a folded section for each topic,
    notes."""
    difference = verdict.difference
    if verdict.reasons:
        yield "\n".join(f"- {as_text(reason)}" for reason in verdict.reasons)
    if difference.cost_rows():
        yield _cost_text(difference)
    for topic in difference.topics:
        count = sum(change.count for change in topic.changes)
        title = f"{CAUSES[topic.cause][0]}: {as_text(topic.title)} ({count})"
        yield details(title, _changes(topic))
    if difference.notes:
        yield "\n".join(f"- note: {code(note)}" for note in difference.notes)


def _change(before: int, after: int, unit: Unit) -> str:
    texts = [value_text(value, unit) for value in (before, after)]
    if before == after or not before:
        return " → ".join(dict.fromkeys(texts))
    return f"{texts[0]} → {texts[1]} ({100 * (after - before) / before:+.3g} %)"


def _cost_text(difference: Difference) -> str:
    rows = [
        (
            as_text(figure.section),
            as_text(figure.name) if figure.section in OWN_WORDS else code(figure.name),
            value_text(figure.before, figure.unit),
            value_text(figure.after, figure.unit),
            change_text(figure),
        )
        for figure in difference.cost_rows()
    ]
    sections = ["", *(row[0] for row in rows)]
    shown = [("" if row[0] == sections[k] else row[0], *row[1:]) for k, row in enumerate(rows)]
    return markdown_table(
        ("", "per device and step", "before", "after", "change"), shown, figures=3
    )


def _changes(topic: Topic) -> str:
    rows = [
        (code(change.what), str(change.count), code(change.before), code(change.after))
        for change in topic.changes[:_MAX_ROWS]
    ]
    rest = len(topic.changes) - _MAX_ROWS
    return markdown_table(("what", "number", "before", "after"), rows) + (
        f"\n\n... and {rest} more (--json lists all)" if rest > 0 else ""
    )
