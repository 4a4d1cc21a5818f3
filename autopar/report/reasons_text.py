"""Why a plan is as it is, as a page for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autopar.ir.units import format_bytes, format_seconds
from autopar.report.decisions import Decision
from autopar.report.limits import margin_text
from autopar.report.names import clean
from autopar.report.reasons import Part, Reasons
from autopar.report.tables import table as new_table

MAX_DECISIONS, MAX_PARTS = 30, 20
"""Rows that are printed; a last line counts the rest."""


def page(reasons: Reasons) -> RenderableType:
    """The choices, what they cost, which limit binds, and what else there could be."""
    time = f"{format_seconds(reasons.time_ns / 1e9)}, {100 * reasons.share:.3g} % of the step"
    is_whole = reasons.kind == "plan"
    sections: list[RenderableType] = [
        Text(clean(f"{reasons.model or '(unnamed)'}: {reasons.subject}"), style="bold")
    ]
    if reasons.decisions:
        _add(sections, "What was chosen", _decisions(reasons.decisions))
    what = "What a step goes to" if is_whole else f"What it costs: {time}"
    _add(sections, what, _parts(reasons.parts))
    if reasons.holdings:
        _add(sections, "What a device holds", _holdings(reasons))
    margin = Text(clean_sentence(margin_text(reasons.limits, reasons.step_ns)))
    if reasons.limits.is_fragile:
        margin.append("\nfragile: that is less than 0.5 %", style="yellow")
    _add(sections, "What limits the plan", Text("\n".join(map(clean, reasons.limits.binds))))
    _add(sections, "How far the next plan is", margin)
    if reasons.alternatives or reasons.benefits:
        _add_alternatives(sections, reasons)
    return Group(*sections)


def _add_alternatives(sections: list[RenderableType], reasons: Reasons) -> None:
    from autopar.report.explanation import alternatives_text, benefits_text

    for each in reasons.alternatives:
        _add(sections, "What else it could be, all else adapting", _lines(alternatives_text(each)))
    if reasons.benefits:
        _add(sections, "What more would buy", _lines(benefits_text(reasons.benefits)))


def clean_sentence(text: str) -> str:
    """Cleaned word by word, for sentences that hold several names."""
    return " ".join(map(clean, text.split(" ")))


def _lines(text: str) -> Text:
    return Text("\n".join(map(clean, text.splitlines())))


def _add(sections: list[RenderableType], title: str, content: RenderableType) -> None:
    sections += [Text(""), Text(title, style="bold"), Padding(content, (0, 0, 0, 2))]


def _decisions(decisions: Sequence[Decision]) -> RenderableType:
    found: list[RenderableType] = []
    for each in decisions[:MAX_DECISIONS]:
        phase = f" in {each.phase}" if each.phase else ""
        count = f", {each.count} times" if each.count > 1 else ""
        found.append(Text(clean(f"{each.name}: {each.what}{phase}{count}"), style="cyan"))
        lines = (*each.choice, *each.reads, *each.makes)
        found += [Padding(Text(clean_sentence(line)), (0, 0, 0, 2)) for line in lines]
    if len(decisions) > MAX_DECISIONS:
        found.append(Text(f"... and {len(decisions) - MAX_DECISIONS} more (--json lists all)"))
    return Group(*found)


def _parts(parts: Sequence[Part]) -> RenderableType:
    if not parts:
        return Text("nothing that takes time of its own")
    table = new_table(("what", "where", "phase"), ("count", "local bytes", "time", "of the step"))
    for part in parts[:MAX_PARTS]:
        table.add_row(
            *(Text(clean(text)) for text in (part.what, part.where, part.phase)),
            str(part.count) if part.count else "",
            format_bytes(part.num_bytes) if part.num_bytes else "",
            format_seconds(part.time_ns / 1e9),
            f"{100 * part.share:.3g} %",
        )
    if len(parts) <= MAX_PARTS:
        return table
    return Group(table, Text(f"... and {len(parts) - MAX_PARTS} more (--json lists all)"))


def _holdings(reasons: Reasons) -> RenderableType:
    limit = reasons.limits.memory_limit_bytes
    table = new_table(("held",), ("bytes", "of the limit"))
    for each in reasons.holdings:
        share = f"{100 * each.num_bytes / limit:.3g} %" if limit else ""
        table.add_row(each.what, format_bytes(each.num_bytes), share)
    return table
