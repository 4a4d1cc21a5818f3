"""How content is printed: pages of rich renderables, as plain text, HTML or Markdown."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.report.names import clean

_WIDTH = 100
_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'

Row = tuple[str, ...]


class Printed(ABC):
    """Content that has a page: printed, or the value of a notebook's cell, it is that."""

    __slots__ = ()

    @abstractmethod
    def page(self) -> RenderableType:
        """The page, for a terminal."""

    def __str__(self) -> str:
        return plain(self.page())

    def _repr_html_(self) -> str:
        console = _console(_WIDTH, record=True)
        console.print(self.page())
        return console.export_html(inline_styles=True, code_format=_PRE)


def plain(renderable: RenderableType, width: int = _WIDTH) -> str:
    """A page in so many columns, without colours."""
    console = _console(width)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _console(width: int, record: bool = False) -> Console:
    return Console(
        width=width, record=record, file=StringIO(), color_system="truecolor" if record else None,
        force_jupyter=False, highlight=False, markup=False, emoji=False, no_color=not record,
    )  # fmt: skip


def table(
    words: Sequence[str],
    figures: Sequence[str],
    rows: Iterable[Iterable[RenderableType]] = (),
) -> Table:
    """A table of `rows`: columns of words, which fold, then of figures, which do not."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in words:
        grid.add_column(title, overflow="fold")
    for title in figures:
        grid.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def section(title: str, content: RenderableType) -> list[RenderableType]:
    """`content`, indented, below a blank line and its title."""
    return [Text(""), Text(title, style="bold"), Padding(content, (0, 0, 0, 2))]


def with_rest(content: RenderableType, num_rows: int, max_rows: int) -> RenderableType:
    """`content`, which has the first `max_rows` rows, and a line that counts the rest."""
    if num_rows <= max_rows:
        return content
    return Group(content, Text(f"... and {num_rows - max_rows} more (--json lists all)"))


def name(text: str, style: str = "") -> Text:
    """A name from a file."""
    return Text(clean(text), style=style)


def columns(rows: Sequence[Row]) -> list[str]:
    """One indented line per row, all of whose cells start where those of the others do."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# Markdown for comments on pull requests. What stands in a plan is text there and nothing else: no
# markup, no mention, no link.

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
