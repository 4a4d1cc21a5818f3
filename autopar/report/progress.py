"""Progress of long work on standard error: a live table on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_ns
from autopar.plans.provenance import SearchStep
from autopar.report.cautions import outcome_text
from autopar.report.names import clean

LINE_EVERY_S = 10.0
"""Without a terminal, the least time between two lines."""

_MOST_ROWS = 8
"""How many candidates the table has, the last ones."""


class TimedLines:
    """Until `close`, what it was called with last is written every `every_s`, with the seconds that
    have passed, also while no call comes. Short work writes nothing."""

    def __init__(self, write: Callable[[str], object], every_s: float | None = None) -> None:
        self._write, self._every_s = write, LINE_EVERY_S if every_s is None else every_s
        self._text, self._start_s = "", time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopar progress", daemon=True)
        self._thread.start()

    def __call__(self, text: str) -> None:
        self._text = text

    def close(self) -> None:
        """Nothing is written from now on."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            if self._text:
                self._write(f"{time.monotonic() - self._start_s:.0f} s: {step_text(self._text)}")


def step_text(text: str) -> str:
    """One line of progress; of a search with the best plan so far."""
    best = text.best if isinstance(text, SearchStep) else None
    if best is None:
        return clean(text)
    return f"{clean(text)}; best so far: {clean(best.candidate)}, {format_ns(best.ns or 0)}"


@contextmanager
def shown_progress(every_s: float = LINE_EVERY_S) -> Generator[Callable[[str], None]]:
    """A function that shows progress on standard error."""
    if not has_terminal():
        with closing(TimedLines(print_line, every_s)) as lines:
            yield lines
        return
    table = _LiveTable()
    with Live(
        console=Console(stderr=True), get_renderable=table, transient=True, refresh_per_second=4
    ):
        yield table.take


def has_terminal() -> bool:
    """Whether standard error is a terminal. A process may have none, or have closed it."""
    stream: TextIO | None = sys.stderr
    return stream is not None and not stream.closed and stream.isatty()


def print_line(line: str) -> None:
    """Writes a line of progress to standard error, if there is one."""
    stream: TextIO | None = sys.stderr
    if stream is not None:
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.write(f"autopar: {line}\n")
            stream.flush()


class _LiveTable:
    """The candidates of a search that are known so far, the best in bold, and what it does now."""

    def __init__(self) -> None:
        self._text, self._start_s = "", time.monotonic()
        self._spinner = Spinner("dots")

    def take(self, text: str) -> None:
        self._text = text

    def __call__(self) -> RenderableType:
        text = self._text
        self._spinner.update(text=Text(f"{clean(text)} ({time.monotonic() - self._start_s:.0f} s)"))
        if not isinstance(text, SearchStep) or not text.outcomes:
            return self._spinner
        table, best = Table.grid(padding=(0, 2)), text.best
        last = text.outcomes[-_MOST_ROWS:]
        rows = last if best is None or best in last else (best, *last[1:])
        for each in rows:
            style = "bold" if each is best else ""
            table.add_row(
                Text(clean(each.candidate), style), Text(clean(outcome_text(each)), style)
            )
        return Group(table, self._spinner)
