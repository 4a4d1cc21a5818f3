"""Curves (`ir.mesh.Curve`) fitted to what collectives were measured to take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf
from typing import NamedTuple

_Figures = Sequence[float]
_Terms = tuple[float, float, float]
_SINGULAR = 1e-12
_ROUNDS = 30
_EXACT = 0.02
"""Points with smaller relative errors than this have equal weights."""
_LEAST = 0.1
"""The start is at least this part of the shortest time, and the bytes take at least this part of
the longest: a figure of zero would be no measurement."""


def crossing(kind: str, ranks: int, sides: int, shared: int) -> tuple[float, int]:
    """(times, adapters): how often a byte of the unsharded side crosses the link's adapters, and
    over how many adapters it is spread. The collective is over `ranks` ranks on `sides` sides of a
    link, `shared` of them on each side (`cost_model.collectives` has the formulas)."""
    match kind:
        case "permute":
            return 1.0, 1
        case "all_to_all":
            return (ranks - 1) / ranks, 1
        case "all_reduce":
            return 2 * (sides - 1) / sides, shared
        case _:
            return (ranks - 1) / ranks, shared


class Fit(NamedTuple):
    """V bytes take `start_s + V / bytes_per_s + root_s sqrt(V)`; `errors` are |fitted / measured
    - 1| of the points that were fitted."""

    start_s: float
    bytes_per_s: float
    root_s: float
    errors: tuple[float, ...]


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """The law through measured (bytes, seconds) with the least sum of relative errors, so that a
    single outlier does not bend it. ValueError without a point.

    Disturbances make a run longer: a message counts for no more than a larger one took. The method
    is least squares, reweighted until they are least absolute errors (Schlossmacher, "An iterative
    technique for absolute deviations curve fitting", 1973). No term is negative: the best fit
    without negative terms is taken, over all subsets of terms.
    """
    if not points:
        raise ValueError("no point to fit to")
    ordered = sorted(points)
    sizes = [size for size, _ in ordered]
    seconds = [min(taken for _, taken in ordered[k:]) for k in range(len(ordered))]
    least = _LEAST * seconds[0], _LEAST * seconds[-1] / sizes[-1], 0.0
    relative = [(1 / t, v / t, v**0.5 / t) for v, t in zip(sizes, seconds, strict=True)]
    target = [1 - _dot(row, least) for row in relative]
    weights, more, errors = [1.0] * len(target), least, target
    for _ in range(_ROUNDS):
        more = _non_negative(relative, target, weights)
        errors = [abs(_dot(row, more) - value) for row, value in zip(relative, target)]
        weights = [1 / max(error, _EXACT) for error in errors]
    start_s, byte_s, root_s = (a + b for a, b in zip(least, more, strict=True))
    return Fit(start_s, 1 / byte_s, root_s, tuple(errors))


def _non_negative(rows: Sequence[_Terms], target: Sequence[float], weights: _Figures) -> _Terms:
    """The weighted least squares solution among those without a negative figure."""
    best, least = (0.0, 0.0, 0.0), inf
    for some in (c for n in range(4) for c in combinations(range(3), n)):
        solution = _least_squares([[row[k] for k in some] for row in rows], target, weights)
        if solution is None or min(solution, default=0) < 0:
            continue
        whole = [0.0] * 3
        for k, figure in zip(some, solution, strict=True):
            whole[k] = figure
        errors = (_dot(row, whole) - value for row, value in zip(rows, target, strict=True))
        squares = sum(w * e * e for w, e in zip(weights, errors, strict=True))
        if squares < least:
            best, least = (whole[0], whole[1], whole[2]), squares
    return best


def _least_squares(
    rows: Sequence[_Figures], target: _Figures, weights: _Figures
) -> list[float] | None:
    """The least squares solution by the normal equations, with normalised columns; None where these
    are singular."""
    n = len(rows[0])
    scale = [sum(row[k] ** 2 for row in rows) ** 0.5 for k in range(n)]
    columns = [[row[k] / scale[k] for row in rows] for k in range(n)]
    table: list[list[float]] = [
        [sum(x * y * w for x, y, w in zip(a, b, weights)) for b in (*columns, target)]
        for a in columns
    ]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(table[i][k]))
        table[k], table[pivot] = table[pivot], table[k]
        if abs(table[k][k]) < _SINGULAR:
            return None
        for i in (i for i in range(n) if i != k):
            part = table[i][k] / table[k][k]
            table[i] = [x - part * y for x, y in zip(table[i], table[k], strict=True)]
    return [table[k][n] / table[k][k] / scale[k] for k in range(n)]


def _dot(a: _Figures, b: _Figures) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
