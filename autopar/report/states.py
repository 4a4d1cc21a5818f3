"""Shardings of tensors in words, where a file may hold any text."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.plan import MeshAxis
from autopar.report.summary import on_axes
from autopar.sharding import Sharding


def parsed(text: str, mesh: Sequence[MeshAxis]) -> Sharding | None:
    """The sharding that a text says, if it is one on this mesh."""
    try:
        found = Sharding.parse(text)
    except ValueError:
        return None
    return found if len(found.placements) == len(mesh) else None


def in_words(text: str, mesh: Sequence[MeshAxis]) -> str:
    """`[S(0) on dp]` of `[S(0), R]`; what is no sharding on this mesh stays as it is."""
    found = parsed(text, mesh)
    return text if found is None else on_axes(found, mesh)


def step_in_words(text: str, mesh: Sequence[MeshAxis]) -> str:
    """`replicated → [S(0) on dp]` of `[R, R] -> [S(0), R]`, a step of a route."""
    return " → ".join(in_words(state, mesh) for state in text.split(" -> "))
