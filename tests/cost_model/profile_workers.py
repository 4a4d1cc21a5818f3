"""What a rank of a measured cluster does."""

from __future__ import annotations

import warnings

import autopar


def measure() -> str:
    """The profile of two nodes of one CPU each, as its file has it."""
    warnings.simplefilter("error")
    found = autopar.profile("cpu", cluster="2x1xcpu", quick=True)
    return found.to_bytes().decode()
