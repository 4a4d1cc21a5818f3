"""What a command says while it works: on standard error, and only to a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def spoken_progress() -> Generator[Callable[[str], None]]:
    """A function that shows what is being done, on standard error; silent without a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    from autopar.report.names import clean

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(clean(text)))
