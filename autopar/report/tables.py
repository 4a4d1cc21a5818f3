"""Tables of pages for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def table(words: Sequence[str], figures: Sequence[str]) -> Table:
    """An empty table: columns of words, which fold, then of figures, which do not."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in words:
        found.add_column(title, overflow="fold")
    for title in figures:
        found.add_column(title, justify="right", no_wrap=True)
    return found
