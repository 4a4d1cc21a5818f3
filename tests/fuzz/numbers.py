"""Which models are drawn: by number, so that a failure can be drawn again."""

from __future__ import annotations

import os
from typing import Any

import pytest


def drawn_numbers(*, daily: int, nightly: int) -> list[Any]:
    """Parameters of a test that draws one model for each number: the first few are daily, those
    up to `nightly` are not. `make fuzz` asks for FUZZ_MODELS of them, from FUZZ_FIRST on."""
    asked = os.environ.get("FUZZ_MODELS")
    if asked is not None:
        first = int(os.environ.get("FUZZ_FIRST", "0"))
        return list(range(first, first + int(asked)))
    return [n if n < daily else pytest.param(n, marks=pytest.mark.nightly) for n in range(nightly)]
