"""Names as people read them: repeated blocks folded to a pattern, nothing a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAME = 160


def clean(name: str) -> str:
    """`name` escaped, and cut to `MAX_NAME` characters: names come from files that others made."""
    return escape(name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…")


def escape(text: str) -> str:
    """`text` with what is not printable (control, format, odd spaces) as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def numbered(names: Iterable[str]) -> str:
    """Names of one pattern as one name: `layers.{0,2-31}.mlp.weight`. A number that is the same in
    all of them stays; where several vary, each is a star."""
    split = [name.split(".") for name in names]
    varying = [k for k, column in enumerate(zip(*split, strict=True)) if len(set(column)) > 1]
    parts = list(split[0])
    for k in varying:
        parts[k] = "*" if len(varying) > 1 else f"{{{_ranges(int(row[k]) for row in split)}}}"
    return ".".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
