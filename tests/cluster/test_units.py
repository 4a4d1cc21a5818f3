"""Quantities parse, print, and refuse in words that say what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.units import (
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)

PAIRS = (
    (parse_bytes, format_bytes, 1.0),
    (parse_bytes_per_s, format_bytes_per_s, 1.0),
    (parse_seconds, format_seconds, 1e-9),
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "72GiB", 72 * 2**30),
        (parse_bytes, "80GB", 80 * 10**9),
        (parse_bytes, " 1.5 KiB ", 1536),
        (parse_bytes, "0.1GB", 10**8),
        (parse_bytes, "7B", 7),
        (parse_bytes, ".5kB", 500),
        (parse_bytes_per_s, "25GB/s", 25e9),
        (parse_bytes_per_s, "200Gb/s", 25e9),
        (parse_bytes_per_s, "200Gbit/s", 25e9),
        (parse_bytes_per_s, "3.35TB/s", 3.35e12),
        (parse_bytes_per_s, "1GiB/s", 2.0**30),
        (parse_seconds, "1.5ms", 1.5e-3),
        (parse_seconds, "20us", 20e-6),
        (parse_seconds, "20µs", 20e-6),
        (parse_seconds, "2min", 120.0),
        (parse_seconds, "0s", 0.0),
    ],
)
def test_parses(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_bytes, "72", "no unit"),
        (parse_bytes, "GiB", "not a size"),
        (parse_bytes, "", "not a size"),
        (parse_bytes, "-1GB", "not a size"),
        (parse_bytes, "1e3GB", "not a size"),
        (parse_bytes, "nanGB", "not a size"),
        (parse_bytes, "80gb", "did you mean GB"),
        (parse_bytes, "80Gb", "did you mean GB"),
        (parse_bytes, "80GB/s", "72GiB"),
        (parse_bytes_per_s, "25GB", "25GB/s"),
        (parse_bytes_per_s, "25gb/s", "did you mean GB/s or Gb/s"),
        (parse_seconds, "5", "no unit"),
        (parse_seconds, "5 MS", "did you mean ms"),
        (parse_seconds, "5 parsecs", "'parsecs' is not a unit of a time"),
    ],
)
def test_refuses_in_words(parse: Callable[[str], float], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (format_bytes(72 * 2**30), "72 GiB"),
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(1000), "0.977 KiB"),
        (format_bytes(1023 * 2**20), "0.999 GiB"),
        (format_bytes_per_s(450e9), "419 GiB/s"),
        (format_seconds(0.4121), "412 ms"),
        (format_seconds(2.5e-9), "2.5 ns"),
        (format_seconds(0.0009996), "1 ms"),
        (format_seconds(86400.0), "86400 s"),
    ],
)
def test_prints_three_digits(printed: str, text: str) -> None:
    assert printed == text


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_prints_no_nonsense(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be printed"):
        format_seconds(value)


@given(st.sampled_from(PAIRS), st.integers(0, 10**18))
def test_printed_parses_to_the_rounded_value(
    pair: tuple[Callable[[str], float], Callable[[float], str], float], value: int
) -> None:
    parse, print_, smallest = pair
    text = print_(value * smallest)
    assert print_(parse(text)) == text
    assert math.isclose(parse(text), value * smallest, rel_tol=5.001e-3)


@given(st.sampled_from(PAIRS), st.text())
def test_any_text_parses_or_is_refused(
    pair: tuple[Callable[[str], float], Callable[[float], str], float], text: str
) -> None:
    try:
        value = pair[0](text)
    except ValueError:
        return
    assert value >= 0
