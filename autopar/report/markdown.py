"""Markdown for comments on pull requests. What stands in a plan is text there and nothing else: no
markup, no mention, no link."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.report.names import clean

MAX_CHARACTERS = 60_000
"""GitHub takes comments of 65,536 characters."""

_LONGEST = 600
_PLAIN = re.compile(r"[^\w .,=/+()-]|_|(?<!w)w(?=ww\.)")


def code(text: str) -> str:
    """`text` as it is, in fixed width. An HTML element, not backticks: those cannot hold a bar in a
    table, nor names that have backticks."""
    return f"<code>{as_text(text)}</code>" if text else ""


def as_text(text: str) -> str:
    """`text` with all that Markdown or HTML could read as markup as numeric entities. GitHub still
    makes links of mentions and addresses: what others wrote belongs in `code`."""
    return _PLAIN.sub(lambda match: f"&#{ord(match[0])};", clean(text, _LONGEST))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], figures: int = 0) -> str:
    """A table of cells that are Markdown; the last `figures` columns are set to the right."""
    rules = ["---"] * (len(head) - figures) + ["---:"] * figures
    lines = [" | ".join(cells) for cells in (head, rules, *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def details(summary: str, content: str) -> str:
    """`content` behind `summary`, both Markdown."""
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def fitted(parts: Sequence[str], limit: int = MAX_CHARACTERS) -> str:
    """`parts` one below the other, as many as fit in `limit` characters; the rest is counted."""
    room = limit - 200
    kept: list[str] = []
    for part in parts:
        if len(part) + 2 <= room:
            kept.append(part)
            room -= len(part) + 2
    left_out = len(parts) - len(kept)
    if left_out:
        kept.append(f"*Sections left out, too long for a comment: {left_out} (--json lists all).*")
    return "\n\n".join(kept) + "\n"
