"""Attributes that are replaced for a while, and replacements that stay."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any


def once(replace: Callable[[], None]) -> Callable[[], None]:
    """`replace`, called at most once in a process: where it raises, parts of it may have been done,
    which must not be done on top of themselves."""
    calls: list[None] = []

    @wraps(replace)
    def first() -> None:
        if not calls:
            calls.append(None)
            replace()

    return first


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Generator[None]:
    """Inside, the attributes of owners are these values: (owner, name, value), set in order."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
