"""Rows of text in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

Row = tuple[str, ...]


def columns(rows: Sequence[Row]) -> list[str]:
    """One indented line per row, all of whose cells start where those of the others do."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
