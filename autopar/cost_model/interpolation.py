"""Between points that were measured, straight along logarithms; beyond them as a law says.

Where measured times rise with each size, so does what is read here, and it meets them: from an edge
of the points on, they are scaled by the law's own ratio, taken at one place of the other size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp, log

from autopar.ir.mesh import ProductGrid

Law = Callable[[float], float]


def on_line(points: Sequence[tuple[float, float]], x: float, law: Law) -> float:
    """The value at `x` of a line through at least one (x, y), all positive, x ascending."""
    inside = min(max(x, points[0][0]), points[-1][0])
    low, part = _place([at for at, _ in points], inside)
    y = _between(points[low][1], points[min(low + 1, len(points) - 1)][1], part)
    return y if inside == x else y * law(x) / law(inside)


def on_grid(
    grid: ProductGrid, out: float, depth: float, law: Callable[[float, float], float]
) -> float:
    """The seconds of a product of `out` elements and `depth`; `law(out, depth)` says what lies
    outside."""
    outs, depths = grid.outs, grid.depths
    inner_out = min(max(out, outs[0]), outs[-1])
    inner_depth = min(max(depth, depths[0]), depths[-1])
    row, down = _place(outs, inner_out)
    column, right = _place(depths, inner_depth)
    across = [
        _between(seconds[column], seconds[min(column + 1, len(depths) - 1)], right)
        for seconds in grid.seconds[row : row + 2]
    ]
    found_s = _between(across[0], across[-1], down)
    if inner_out != out:
        at = depths[-1] if out > inner_out else depths[0]
        found_s *= law(out, at) / law(inner_out, at)
    if inner_depth != depth:
        at = outs[-1] if depth > inner_depth else outs[0]
        found_s *= law(at, depth) / law(at, inner_depth)
    return found_s


def _place(xs: Sequence[float], x: float) -> tuple[int, float]:
    """The last of `xs` that is not beyond `x`, and how far along to the next it lies."""
    low = min(bisect_right(xs, x), len(xs)) - 1
    if low + 1 == len(xs) or x == xs[low]:
        return low, 0.0
    return low, log(x / xs[low]) / log(xs[low + 1] / xs[low])


def _between(low: float, high: float, part: float) -> float:
    return low if part == 0 else exp((1 - part) * log(low) + part * log(high))
