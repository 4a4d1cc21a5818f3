"""Sets of dotted names as texts: `layers.{0-3,7}.mlp.weight` stands for five parameters.

A part between dots that is a number may vary; `compress` finds the texts, `expand` reads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

MAX_NAMES = 200_000
"""Names that one text, or all texts of a file together, may stand for."""

_MAX_DIGITS = 9

_Numbers = tuple[int, ...]
_Sets = tuple[tuple[_Numbers, ...], ...]


def compress(names: Iterable[str]) -> tuple[str, ...]:
    """The texts that together stand for `names`, sorted: the same whatever their order. Where two
    numbers vary, one text has all their combinations."""
    shapes: dict[tuple[str | None, ...], list[_Numbers]] = {}
    for name in names:
        parts = name.split(".")
        shape = tuple(None if _is_number(part) else _literal(part) for part in parts)
        shapes.setdefault(shape, []).append(tuple(int(p) for p in parts if _is_number(p)))
    return tuple(
        sorted(_text(shape, sets) for shape, found in shapes.items() for sets in _merged(found))
    )


def expand(text: str) -> tuple[str, ...]:
    """The names that `text` stands for, in order of their numbers. ValueError if it is malformed,
    or stands for more than `MAX_NAMES`."""
    parts = [_read(part) for part in text.split(".")]
    total = 1
    for part in parts:
        total *= len(part)
        if total > MAX_NAMES:
            raise ValueError(f"{text} stands for more than {MAX_NAMES} names")
    return tuple(".".join(name) for name in product(*parts))


def _is_number(part: str) -> bool:
    """Only as Python prints it: `03` is a name."""
    short = part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS
    return short and str(int(part)) == part


def _literal(part: str) -> str:
    return "\\" + part if part[:1] in ("{", "\\") else part


def _merged(sets: Iterable[_Numbers]) -> _Sets:
    """Products of sets of numbers that make up `sets`, tuples of equal length."""
    rests: dict[int, list[_Numbers]] = {}
    for numbers in sorted(set(sets)):
        if not numbers:
            return ((),)
        rests.setdefault(numbers[0], []).append(numbers[1:])
    alike: dict[_Sets, list[int]] = {}
    for first, rest in rests.items():
        alike.setdefault(_merged(rest), []).append(first)
    return tuple((tuple(firsts), *rest) for rests, firsts in alike.items() for rest in rests)


def _text(shape: Sequence[str | None], sets: Sequence[_Numbers]) -> str:
    numbers = iter(sets)
    return ".".join(_ranges(next(numbers)) if part is None else part for part in shape)


def _ranges(numbers: _Numbers) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return "{" + ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs) + "}"


def _read(part: str) -> Sequence[str]:
    if part.startswith("\\"):
        return (part[1:],)
    if not part.startswith("{"):
        return (part,)
    if not part.endswith("}"):
        raise ValueError(f"{part!r} lacks its closing brace")
    found: list[str] = []
    for run in part[1:-1].split(","):
        first, dash, last = run.partition("-")
        if not (_is_number(first) and (not dash or _is_number(last))):
            raise ValueError(f"{run!r} is no range of numbers")
        low, high = int(first), int(last if dash else first)
        if not low <= high < low + MAX_NAMES or len(found) + high - low >= MAX_NAMES:
            raise ValueError(f"{run!r} stands for more than {MAX_NAMES} names, or none")
        found += map(str, range(low, high + 1))
    return found
