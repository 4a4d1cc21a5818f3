"""A step of a pipeline as a picture of text."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from autopar.ir.pipeline import Action, ActionSpan, ActionTable, Pass

COLUMNS = 72
"""Columns of the picture of a step."""

MAX_RANKS = 32
"""Rows of it."""

_STYLES = {Pass.FORWARD: "blue", Pass.BACKWARD: "green", Pass.WEIGHTS: "yellow"}
_MARKS = {Pass.FORWARD: "0123456789", Pass.BACKWARD: "abcdefghij", Pass.WEIGHTS: "ABCDEFGHIJ"}
"""What stands for an action: the last digit of its microbatch, as a letter on the way back."""


def draw(
    table: ActionTable, spans: Mapping[Action, ActionSpan], width: int = COLUMNS
) -> tuple[str, ...]:
    """A line per rank, in which each column is an equal part of the time until the last action is
    over: what is done in the middle of it."""
    end = max(span.end for span in spans.values())
    lines: list[str] = []
    for row in table.rows[:MAX_RANKS]:
        line = [" "] * width
        for action in row:
            span = spans[action]
            for column in range(span.start * width // end, -(-span.end * width // end)):
                middle = (2 * column + 1) * end
                if 2 * width * span.start <= middle < 2 * width * span.end:
                    line[column] = _MARKS[action.kind][action.microbatch % 10]
        lines.append("".join(line))
    return tuple(lines)


def coloured(line: str) -> Text:
    """A line of the picture, in colours."""
    kinds = {mark: kind for kind, marks in _MARKS.items() for mark in marks}
    text = Text()
    for mark in line:
        text.append(mark, _STYLES[kinds[mark]] if mark in kinds else "")
    return text
