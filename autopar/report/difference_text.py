"""A difference of plans as a page for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_bytes, format_seconds
from autopar.report.bill import MEMORY, TIME, Figure
from autopar.report.changes import Cause, Change, Topic
from autopar.report.difference import Difference, Side
from autopar.report.figures import change_text, value_text
from autopar.report.names import clean
from autopar.report.verdict import SAME, Verdict

MAX_ROWS = 30
"""Changes of a topic that are printed; a last line counts the rest."""

CAUSES: dict[Cause, str] = {
    "model": "The model",
    "request": "What it is planned for",
    "decision": "Decided otherwise",
}


def page(verdict: Verdict) -> RenderableType:
    """The page of a verdict: what counts, what changed by cause, and the bill."""
    difference = verdict.difference
    sections: list[RenderableType] = [_head(verdict)]
    for cause, title in CAUSES.items():
        for topic in difference.with_cause(cause):
            heading = Text(f"{title}: {clean(topic.title)}", style="bold")
            sections += [Text(""), heading, Padding(_changes(topic), (0, 0, 0, 2))]
    shown = bill_rows(difference)
    if shown:
        sections += [Text(""), Text("The bill, per device and step", style="bold")]
        sections.append(Padding(_bill(shown), (0, 0, 0, 2)))
    sections += [Text("")] * bool(difference.notes)
    sections += [Text("note: ", "yellow").append(clean(n), "default") for n in difference.notes]
    return Group(*sections)


def verdict_line(verdict: Verdict) -> str:
    """`same`, or what counts."""
    if verdict.status != SAME:
        return f"different: {'; '.join(map(clean, verdict.reasons))}"
    return "different, but in nothing that counts" if differs(verdict.difference) else "same"


def differs(difference: Difference) -> bool:
    """Whether anything is otherwise, count or not."""
    return bool(difference.topics) or any(map(_changed, difference.bill))


def bill_rows(difference: Difference) -> list[Figure]:
    """The figures worth a row: times and memory if any figure changed, others that changed."""
    if not any(map(_changed, difference.bill)):
        return []
    return [
        figure
        for figure in difference.bill
        if _changed(figure)
        or (figure.section in (TIME, MEMORY) and (figure.before or figure.after))
    ]


def _changed(figure: Figure) -> bool:
    return figure.before != figure.after and None not in (figure.before, figure.after)


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
        f"{format_seconds(side.step_ns / 1e9)}, {format_bytes(side.memory_bytes)} of "
        f"{format_bytes(side.memory_limit_bytes)}; plan {side.digest[:12]}"
    )


def _changes(topic: Topic) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=2)
    table.add_column(overflow="fold", ratio=3)
    for change in topic.changes[:MAX_ROWS]:
        table.add_row(*_row(change))
    rest = len(topic.changes) - MAX_ROWS
    if rest <= 0:
        return table
    return Group(table, Text(f"... and {rest} more (--json lists all)"))


def _row(change: Change) -> Iterator[Text]:
    added, gone = not change.before, not change.after
    yield Text("+", "green") if added else Text("-", "red") if gone else Text("~", "yellow")
    yield Text(clean(change.what) + (f" ({change.count})" if change.count > 1 else ""))
    text = Text(clean(change.before), "red")
    if not (added or gone):
        text.append(" -> ", "default")
    yield text.append(clean(change.after), "green")


def _bill(figures: Sequence[Figure]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    section = ""
    for figure in figures:
        if figure.section != section:
            section = figure.section
            table.add_row(Text(section, "dim"))
        table.add_row(
            Text(f"  {clean(figure.name)}"),
            value_text(figure.before, figure.unit),
            value_text(figure.after, figure.unit),
            change_text(figure),
            style="bold" if figure.name in ("step", "peak") else "",
        )
    return table
