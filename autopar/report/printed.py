"""How content is printed: pages of rich renderables, as plain text or as HTML, and rows of text in
aligned columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_percent
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
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in words:
        found.add_column(title, overflow="fold")
    for title in figures:
        found.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


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


class Speed(Protocol):
    """Of a step: tokens or samples a second, 0 where they are not told, and the share of the
    devices' peak FLOP/s."""

    @property
    def tokens_per_s(self) -> int: ...
    @property
    def samples_per_s(self) -> int: ...
    @property
    def utilisation(self) -> float: ...


def speed_text(speed: Speed) -> str:
    """A speed in words."""
    unit = "tokens" if speed.tokens_per_s else "samples"
    per_s = speed.tokens_per_s or speed.samples_per_s
    rate = f"{per_s:,} {unit}/s, " if per_s else ""
    return f"{rate}{format_percent(speed.utilisation)} of the devices' peak FLOP/s"
