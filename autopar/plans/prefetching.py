"""When gathers of parameters start in the block that hides them (`ir.blocks`).

Messages on the links of one mesh axis come one after the other. Where no op of a block waits for
any on an axis, all gathers that are due there start with the block: the links never rest while
there is something to bring. Else they start behind what ops wait for, where the longest computing
follows, so that as little as can be waits behind them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import prod

from autopar.ir.graph import Graph, Node
from autopar.plans.bucketing import Gathers

_PRODUCTS_PER_ELEMENT = 400
"""Multiplications and additions that a GPU does in the time that it takes to read and write an
element: 990 TFLOP/s to 3.35 TB/s on an H100 at four bytes per element, 1,700 to 4.8 on a B200."""


def starts_before(
    graph: Graph,
    gathers: Gathers,
    blocks: Mapping[int, Sequence[Node]],
    waited_on: Mapping[int, Collection[int]],
) -> dict[int, list[int]]:
    """Which buckets of `gathers` start before which op, after what it waits for has come.

    `blocks` has the ops of each block in order, `waited_on` the axes that ops wait for.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for block, places in gathers.due.items():
        ops = blocks.get(block, ())
        by_axis: dict[int, list[int]] = defaultdict(list)
        for place in places:
            by_axis[gathers.buckets[place].axis].append(place)
        for axis, due in by_axis.items():
            intervals = _intervals(graph, ops, axis, waited_on)
            for place, op in zip(due, _spread(gathers, due, intervals), strict=False):
                found[op].append(place)
    for due in found.values():
        due.sort()
    return found


def _intervals(
    graph: Graph, ops: Sequence[Node], axis: int, waited_on: Mapping[int, Collection[int]]
) -> list[tuple[int, float]]:
    """The ops of a block up to the next that waits for a message on `axis`: the first of them, and
    how long they take, in no unit."""
    found: list[tuple[int, float]] = []
    for node in ops:
        if not found or axis in waited_on.get(node.index, ()):
            found.append((node.index, 0.0))
        first, so_far = found[-1]
        found[-1] = first, so_far + work(graph, node)
    return found


def work(graph: Graph, node: Node) -> float:
    """How many elements are read and written in the time that an op takes on one device. The dims
    that a draw is given have nothing to do with those it makes: it takes no products of them."""
    made = sum(prod(tensor.shape) for tensor in node.outputs)
    if node.random:
        return made
    sizes = (graph.atoms[atom].size for atom in {factor.atom for factor in node.factors})
    return made + prod(sizes) / _PRODUCTS_PER_ELEMENT


def _spread(
    gathers: Gathers, due: Sequence[int], intervals: Sequence[tuple[int, float]]
) -> list[int]:
    """Before which op each of `due` starts: bytes in proportion to work."""
    if not intervals:
        return []
    sizes = [gathers.buckets[place].num_bytes for place in due]
    ends = [*accumulate(work for _, work in intervals)]
    middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
    scale = ends[-1] / max(1, sum(sizes))
    return [intervals[bisect_left(ends, middle * scale)][0] for middle in middles]
