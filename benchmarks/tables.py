"""A table of text, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others are figures."""
    marks = ["---", *("---:" for _ in header[1:])]
    lines = [header, marks, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def tell(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    as_markdown: bool,
    width: int = 140,
) -> None:
    """Print the table under its title, as Markdown or for a terminal (`show`)."""
    if as_markdown:
        click.echo(f"{title}\n\n{markdown(header, rows)}")
    else:
        show(title, header, rows, width)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Print the table; `width` is the least one where the output is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
