"""Models that the fuzzer found wanting, as small as they could be made."""

from __future__ import annotations

REGRESSIONS: dict[str, str] = {}
