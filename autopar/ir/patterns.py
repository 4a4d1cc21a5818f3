"""Sets of dotted names as texts: `layers.{0-3,7}.mlp.weight` stands for five parameters.

A part between dots that is a number may vary; `compress` finds the texts, `expand` reads one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, product

from autopar.ir.grouping import grouped

MAX_NAMES = 200_000
"""Names that one text, or all texts of a file together, may stand for."""

_MAX_DIGITS = 9

_Numbers = tuple[int, ...]
_Sets = tuple[tuple[_Numbers, ...], ...]


def compress(names: Iterable[str]) -> tuple[str, ...]:
    """The texts that together stand for `names`, sorted: the same whatever their order. Where two
    numbers vary, one text has all their combinations."""
    shapes = grouped(
        (
            tuple(None if _is_number(part) else _literal(part) for part in parts),
            tuple(int(part) for part in parts if _is_number(part)),
        )
        for parts in (name.split(".") for name in names)
    )
    return tuple(
        sorted(_text(shape, sets) for shape, numbers in shapes.items() for sets in _merged(numbers))
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
    ordered = sorted(set(sets))
    if ordered == [()]:
        return ((),)
    rests = grouped((numbers[0], numbers[1:]) for numbers in ordered)
    alike = grouped((_merged(rest), first) for first, rest in rests.items())
    return tuple((tuple(firsts), *rest) for rests, firsts in alike.items() for rest in rests)


def _text(shape: Sequence[str | None], sets: Sequence[_Numbers]) -> str:
    numbers = iter(sets)
    return ".".join(_ranges(next(numbers)) if part is None else part for part in shape)


def _ranges(numbers: _Numbers) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    # In a run of numbers, those less their places are all one.
    pairs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    return "{" + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) + "}"


def _read(part: str) -> Sequence[str]:
    if part.startswith("\\"):
        return (part[1:],)
    if not part.startswith("{"):
        return (part,)
    if not part.endswith("}"):
        raise ValueError(f"{part!r} lacks its closing brace")
    numbers: list[str] = []
    for run in part[1:-1].split(","):
        first, dash, last = run.partition("-")
        if not (_is_number(first) and (not dash or _is_number(last))):
            raise ValueError(f"{run!r} is no range of numbers")
        low, high = int(first), int(last if dash else first)
        if not low <= high < low + MAX_NAMES or len(numbers) + high - low >= MAX_NAMES:
            raise ValueError(f"{run!r} stands for more than {MAX_NAMES} names, or none")
        numbers += map(str, range(low, high + 1))
    return numbers
