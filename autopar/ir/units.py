"""Quantities as people write them: `72GiB`, `80GB`, `25GB/s`, `200Gb/s`, `1.5ms`.

B is a byte, b (or bit) a bit; k, M, G, T, P are powers of 1000, Ki, Mi, Gi, Ti, Pi of 1024. Printed
are binary bytes and seconds, with three significant digits. What is printed parses, to the rounded
value.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import isfinite

_QUANTITY = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([^\s\d.]*)\s*", re.ASCII)
_BYTES = {"B": Fraction(1), "b": Fraction(1, 8), "bit": Fraction(1, 8)}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_AMOUNTS = {
    prefix + unit: factor * scale
    for prefix, factor in (_DECIMAL | _BINARY).items()
    for unit, scale in _BYTES.items()
}
_SIZES = {unit: scale for unit, scale in _AMOUNTS.items() if unit.endswith("B")}
_RATES = {f"{unit}/s": scale for unit, scale in _AMOUNTS.items()}
_TIMES = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_PRINTED_SIZES = (("B", 1.0), *((f"{prefix}B", float(scale)) for prefix, scale in _BINARY.items()))
_PRINTED_TIMES = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def parse_bytes(text: str) -> int:
    """Bytes of `72GiB` or `80GB`, rounded to a whole one. ValueError says what is wrong."""
    return round(_parse(text, _SIZES, "a size in bytes", "72GiB or 80GB"))


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of `25GB/s` or `200Gb/s`. ValueError says what is wrong."""
    return float(_parse(text, _RATES, "a bandwidth", "25GB/s or 200Gb/s"))


def parse_seconds(text: str) -> float:
    """Seconds of `1.5ms`, `20us` or `2min`. ValueError says what is wrong."""
    return float(_parse(text, _TIMES, "a time", "1.5ms or 60s"))


def format_bytes(num_bytes: int) -> str:
    """`72 GiB`; ValueError unless finite and not negative (so for rates and times)."""
    return _format(num_bytes, _PRINTED_SIZES)


def exact_bytes(num_bytes: int) -> str:
    """`1536GiB`, which parses to just that: in the largest unit of which it is a whole number."""
    for prefix, scale in reversed(_BINARY.items()):
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{prefix}B"
    return f"{num_bytes}B"


def format_bytes_per_s(bytes_per_s: float) -> str:
    """`419 GiB/s`."""
    return _format(bytes_per_s, _PRINTED_SIZES) + "/s"


def format_seconds(seconds: float) -> str:
    """`412 ms`."""
    return _format(seconds, _PRINTED_TIMES)


def format_ns(nanoseconds: float) -> str:
    """The same of nanoseconds."""
    return format_seconds(nanoseconds / 1e9)


def format_percent(fraction: float) -> str:
    """`31.2 %` of 0.312."""
    return f"{100 * fraction:.3g} %"


def format_count(number: int, what: str) -> str:
    """`1 device`; `2 devices`, `2 processes`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def format_ppm(millionths: float) -> str:
    """`31.2 %` of 312,000."""
    return format_percent(millionths / 1e6)


def format_share(part: float, whole: float) -> str:
    """`31.2 %`; empty if the whole is nothing."""
    return format_percent(part / whole) if whole else ""


def format_bytes_of(part: int, whole: int) -> str:
    """`11.3 GiB of 36 GiB (31.2 %)`."""
    share = format_share(part, whole)
    return f"{format_bytes(part)} of {format_bytes(whole)}" + (f" ({share})" if share else "")


def _parse(text: str, units: dict[str, Fraction], what: str, example: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {what}: write a number and a unit, such as {example}")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{text!r} has no unit: write {what}, such as {example}")
    if unit not in units:
        alike = [known for known in units if known.lower() == unit.lower()]
        hint = f"did you mean {' or '.join(alike)}" if alike else f"write it as in {example}"
        raise ValueError(f"{text!r}: {unit!r} is not a unit of {what}; {hint}")
    return Fraction(number) * units[unit]


def _format(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{value} cannot be printed as a quantity")
    unit, scale = next((u for u in units if float(f"{value / u[1]:.3g}") < 1000), units[-1])
    rounded = float(f"{value / scale:.3g}")
    return f"{rounded:.15g} {unit}" if rounded < 1e15 else f"{rounded:.0f} {unit}"
