"""A difference of plans as Markdown, for a comment on a pull request that is updated in place."""

from __future__ import annotations

from autopar.report.bill import OWN_WORDS
from autopar.report.changes import Topic
from autopar.report.difference import Difference
from autopar.report.difference_text import CAUSES, MAX_ROWS, bill_rows, differs
from autopar.report.figures import change_text, share_text, value_text
from autopar.report.markdown import code, details, fitted, plain, table
from autopar.report.verdict import SAME, Verdict


def markdown(verdict: Verdict, name: str) -> str:
    """The whole comment. A comment with the same first line is an older one on the same `name`."""
    return fitted([f"<!-- autopar-diff:v1:{marked(name)} -->", headline(verdict), *parts(verdict)])


def marked(name: str) -> str:
    """`name` as it can stand in an HTML comment."""
    return "".join(c if c.isalnum() or c in "/._ " else "_" for c in name)[:100]


def headline(verdict: Verdict) -> str:
    """The verdict in one line, with step, peak and communication."""
    old, new = verdict.difference.old, verdict.difference.new
    word = "Nothing that counts changed" if differs(verdict.difference) else "Same plan"
    word = word if verdict.status == SAME else "**The plan changed**"
    steps = _change(old.step_ns, new.step_ns, "ns")
    peaks = _change(old.memory_bytes, new.memory_bytes, "bytes")
    limit = value_text(new.memory_limit_bytes, "bytes")
    full = share_text(new.memory_bytes, new.memory_limit_bytes)
    shares = [share_text(side.communication_ns, side.step_ns) for side in (old, new)]
    sent = " → ".join(dict.fromkeys(shares))
    return f"{word}: step {steps}, peak {peaks} of {limit} ({full}), communication {sent}"


def parts(verdict: Verdict) -> list[str]:
    """What follows the headline: reasons, the bill, a folded section for each topic, notes."""
    difference = verdict.difference
    found: list[str] = []
    if verdict.reasons:
        found.append("\n".join(f"- {plain(reason)}" for reason in verdict.reasons))
    if bill_rows(difference):
        found.append(_bill(difference))
    found += [
        details(f"{CAUSES[topic.cause]}: {plain(topic.title)} ({_count(topic)})", _changes(topic))
        for topic in difference.topics
    ]
    if difference.notes:
        found.append("\n".join(f"- note: {code(note)}" for note in difference.notes))
    return found


def _change(before: int, after: int, unit: str) -> str:
    texts = [value_text(value, "ns" if unit == "ns" else "bytes") for value in (before, after)]
    if before == after or not before:
        return " → ".join(dict.fromkeys(texts))
    return f"{texts[0]} → {texts[1]} ({100 * (after - before) / before:+.3g} %)"


def _bill(difference: Difference) -> str:
    rows = [
        (
            plain(figure.section),
            plain(figure.name) if figure.section in OWN_WORDS else code(figure.name),
            value_text(figure.before, figure.unit),
            value_text(figure.after, figure.unit),
            change_text(figure),
        )
        for figure in bill_rows(difference)
    ]
    sections = ["", *(row[0] for row in rows)]
    shown = [("" if row[0] == sections[k] else row[0], *row[1:]) for k, row in enumerate(rows)]
    return table(("", "per device and step", "before", "after", "change"), shown, figures=3)


def _changes(topic: Topic) -> str:
    rows = [
        (code(change.what), str(change.count), code(change.before), code(change.after))
        for change in topic.changes[:MAX_ROWS]
    ]
    text = table(("what", "number", "before", "after"), rows)
    rest = len(topic.changes) - MAX_ROWS
    return text + (f"\n\n... and {rest} more (--json lists all)" if rest > 0 else "")


def _count(topic: Topic) -> int:
    return sum(change.count for change in topic.changes)
