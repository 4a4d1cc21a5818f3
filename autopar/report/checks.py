"""The outcomes of golden plans: the content of `autopar check`, and its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_count
from autopar.report.cost_comparison import value_text
from autopar.report.names import clean
from autopar.report.printed import Printed, code, details, fitted, markdown_table
from autopar.report.verdict import DIFFERENT, SAME, Verdict, parts, verdict_headline, verdict_line

CheckStatus = Literal["same", "different", "missing", "created", "updated", "error"]

ERROR = 1
MARKER = "<!-- autopar-check:v1 -->"
"""The first line of a comment, by which the next check finds it."""

_STYLES: dict[CheckStatus, str] = {
    "same": "green", "created": "green", "updated": "yellow", "different": "red", "missing": "red",
    "error": "red",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one golden plan; `verdict` if there was a plan to compare with."""

    name: str
    status: CheckStatus
    message: str = ""
    verdict: Verdict | None = None
    step_ns: int | None = None
    from_cache: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checks(Printed):
    """All outcomes, and the exit status: 1 if any is an error, or else 2 if any plan differs or is
    missing."""

    status: int
    outcomes: tuple[CheckOutcome, ...]

    def page(self) -> RenderableType:
        """A table of all outcomes, below the differences of plans that differ."""
        sections: list[RenderableType] = []
        for outcome in self.outcomes:
            if outcome.verdict is not None and outcome.verdict.status != SAME:
                sections += [
                    Text(clean(outcome.name), style="bold underline"),
                    Padding(outcome.verdict.page(), (0, 0, 1, 2)),
                ]
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        grid.add_column("plan", overflow="fold")
        grid.add_column("result")
        grid.add_column("step", justify="right", no_wrap=True)
        grid.add_column("", overflow="fold")
        for outcome in self.outcomes:
            grid.add_row(
                Text(clean(outcome.name)),
                Text(outcome.status, _STYLES[outcome.status]),
                value_text(outcome.step_ns, "ns"),
                Text(_why(outcome)),
            )
        return Group(*sections, grid, Text(counted(self), style="bold"))


def checks(outcomes: Sequence[CheckOutcome]) -> Checks:
    """The outcomes, and the exit status of all of them."""
    statuses = {outcome.status for outcome in outcomes}
    status = DIFFERENT if statuses & {"different", "missing"} else SAME
    return Checks(ERROR if "error" in statuses else status, tuple(outcomes))


def counted(content: Checks) -> str:
    """`3 plans: 2 same, 1 different`, and how many were in the cache."""
    cached = sum(outcome.from_cache for outcome in content.outcomes)
    cached_text = f"; {cached} solved before" if cached else ""
    return f"{format_count(len(content.outcomes), 'plan')}: {_statuses(content)}{cached_text}"


def _statuses(content: Checks) -> str:
    counts = Counter(outcome.status for outcome in content.outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])


def checks_markdown(content: Checks) -> str:
    """A comment for a pull request: the verdict, a table, a folded section for each difference."""
    word = "All plans are the same" if content.status == SAME else "**Plans changed**"
    if content.status == ERROR:
        word = "**Plans could not be checked**"
    rows = [
        (
            code(o.name),
            o.status,
            value_text(o.step_ns, "ns"),
            code(_why(o)) if o.message else _why(o),
        )
        for o in content.outcomes
    ]
    sections = [
        MARKER,
        f"{word}: {_statuses(content)}",
        markdown_table(("plan", "result", "step", ""), rows),
    ]
    for outcome in content.outcomes:
        if outcome.verdict is not None and outcome.verdict.status != SAME:
            body = "\n\n".join([verdict_headline(outcome.verdict), *parts(outcome.verdict)])
            sections.append(details(code(outcome.name), body))
    return fitted(sections)


def _why(outcome: CheckOutcome) -> str:
    """The reason of an outcome, in one line."""
    if outcome.message:
        return clean(" ".join(outcome.message.split()), 600)
    if outcome.verdict is None or outcome.verdict.status == SAME:
        return ""
    return verdict_line(outcome.verdict).removeprefix("different: ")
