"""Names as people read them: nothing a terminal would obey, nothing endless."""

from __future__ import annotations

MAX_NAME = 160


def clean(name: str, longest: int = MAX_NAME) -> str:
    """`name` escaped, and cut to `longest` characters: names come from files that others made."""
    return escape(name if len(name) <= longest else f"{name[: longest - 1]}…")


def escape(text: str) -> str:
    """`text` with what is not printable (control, format, odd spaces) as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
