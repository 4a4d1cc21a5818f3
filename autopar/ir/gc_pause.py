"""Python's collector of cycles, paused where it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Generator[None, None, None]:
    """While a graph is made, many objects come and few go; the collector would look through all of
    them again and again, which takes a fifth of the time of planning."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def end_collection() -> None:
    """For a process that is about to end: what there is now is not looked through once more. After
    a plan that would take a second, since torch and a model are a million objects."""
    gc.freeze()
