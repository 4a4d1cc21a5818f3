"""The picture of a block: ops as boxes in layers, and what is redistributed between them.

A box has a stripe per mesh axis. It has the colour of the axis if what the box makes is sharded on
it, and is hatched for a partial sum, pale if replicated. An arrow along which a tensor is
redistributed is drawn strong, and the sharding it is read in stands above the box it leads to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
from markupsafe import Markup

from autopar.ir.mesh import Mesh
from autopar.ir.units import format_ns
from autopar.report.html.block_graph import BlockGraph, Box, TensorRead, TensorWrite
from autopar.report.html.svg import cut, picture, points, rect, svg_path, text, text_width
from autopar.report.placed import parsed, sharding_text

# Where the boxes and arrows of a small graph without cycles go on paper.
#
# Boxes stand in layers, each below all it follows; an arrow over several layers passes through a
# narrow place in each, so that it crosses no box. Within a layer boxes are ordered by the middle of
# their neighbours (Sugiyama, Tagawa and Toda, 1981). Then they are placed as near as possible to
# below and above these: least squares under the order, which is isotonic regression.

Point = tuple[float, float]

_SWEEPS = 24
_LANE = 18.0
_LOOSE = 0.3
_BESIDE, _BETWEEN = 22.0, 30.0


@dataclass(frozen=True, slots=True)
class Placed:
    """The middle of each box's upper edge, the points that each arrow passes, and the size of the
    paper."""

    boxes: tuple[Point, ...]
    arrows: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def arrange(sizes: Sequence[tuple[float, float]], arrows: Sequence[tuple[int, int]]) -> Placed:
    """Where boxes and arrows go. `sizes` are (width, height) of the boxes; `arrows` lead from a box
    to another, without cycles and repetitions. Groups that no arrows join stand side by side, the
    largest first."""
    graph: nx.Graph[int] = nx.Graph(arrows)
    graph.add_nodes_from(range(len(sizes)))
    joined = map(sorted, nx.connected_components(graph))
    groups = sorted(joined, key=lambda group: (-len(group), group))
    boxes: list[Point] = [(0.0, 0.0)] * len(sizes)
    passed: dict[tuple[int, int], tuple[Point, ...]] = {}
    width = height = 0.0
    for group in groups:
        index = {box: k for k, box in enumerate(group)}
        inside = [arrow for arrow in arrows if arrow[0] in index]
        part = _place([sizes[box] for box in group], [(index[a], index[b]) for a, b in inside])
        left = width + 2 * _BESIDE if width else 0.0
        for box, (x, y) in zip(group, part.boxes, strict=True):
            boxes[box] = left + x, y
        for arrow, path in zip(inside, part.arrows, strict=True):
            passed[arrow] = tuple((left + x, y) for x, y in path)
        width, height = left + part.width, max(height, part.height)
    return Placed(tuple(boxes), tuple(passed[arrow] for arrow in arrows), width, height)


def _place(sizes: Sequence[tuple[float, float]], arrows: Sequence[tuple[int, int]]) -> Placed:
    layers = _layers(len(sizes), arrows)
    widths, heights = [w for w, _ in sizes], [h for _, h in sizes]
    chains: list[list[int]] = []
    for start, end in arrows:
        lanes = range(layers[start] + 1, layers[end])
        chains.append([start, *range(len(widths), len(widths) + len(lanes)), end])
        layers += lanes
        widths += [_LANE] * len(lanes)
        heights += [0.0] * len(lanes)
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for chain in chains:
        for a, b in pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    rows: list[list[int]] = [[] for _ in range(max(layers, default=-1) + 1)]
    for box, layer in enumerate(layers):
        rows[layer].append(box)
    _order(rows, above, below)
    x = _columns(rows, widths, above, below)
    tops = [0.0]
    for row in rows:
        tops.append(tops[-1] + max(heights[box] for box in row) + _BETWEEN)

    def passed(chain: list[int]) -> Iterator[Point]:
        for k, box in enumerate(chain):
            top = tops[layers[box]]
            if k:
                yield x[box], top
            if k < len(chain) - 1:
                lane = k > 0
                yield x[box], tops[layers[box] + 1] - _BETWEEN if lane else top + heights[box]

    return Placed(
        boxes=tuple((x[box], tops[layers[box]]) for box in range(len(sizes))),
        arrows=tuple(tuple(passed(chain)) for chain in chains),
        width=max((x[box] + widths[box] / 2 for box in range(len(widths))), default=0.0),
        height=tops[-1] - _BETWEEN if rows else 0.0,
    )


def _layers(count: int, arrows: Sequence[tuple[int, int]]) -> list[int]:
    """The layer of each box: below all boxes that it follows. A box that follows none is just above
    the first that follows it."""
    graph: nx.DiGraph[int] = nx.DiGraph(arrows)
    graph.add_nodes_from(range(count))
    layers = [0] * count
    for layer, boxes in enumerate(nx.topological_generations(graph)):
        for box in boxes:
            layers[box] = layer
    for box in range(count):
        if not graph.pred[box] and graph.succ[box]:
            layers[box] = min(layers[end] for end in graph.succ[box]) - 1
    return layers


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each row by the mean place of the neighbours in the row next to it, down and up."""
    place = {box: k - len(row) / 2 for row in rows for k, box in enumerate(row)}
    for sweep in range(_SWEEPS):
        beside = below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            mean = {
                box: sum(place[n] for n in beside[box]) / len(beside[box])
                if beside[box]
                else place[box]
                for box in row
            }
            row.sort(key=lambda box: (mean[box], place[box], box))
            place.update((box, k - len(row) / 2) for k, box in enumerate(row))


def _columns(
    rows: list[list[int]], widths: list[float], above: list[list[int]], below: list[list[int]]
) -> list[float]:
    """The middle of every box; boxes of a row leave room for their widths. Boxes at which chains of
    arrows end weigh less than others, and make room for them."""
    x = [0.0] * len(widths)
    weights = [1.0 if above[k] and below[k] else _LOOSE for k in range(len(widths))]
    for sweep in range(_SWEEPS):
        for row in reversed(rows) if sweep % 2 else rows:
            targets: list[float] = []
            for box in row:
                near = above[box] + below[box] if sweep >= 4 else above[box] or below[box]
                total = sum(weights[n] for n in near)
                targets.append(sum(weights[n] * x[n] for n in near) / total if near else x[box])
            spans = [widths[box] for box in row]
            for box, at in zip(row, _apart(targets, spans, [weights[box] for box in row])):
                x[box] = at
    left = min((x[k] - widths[k] / 2 for k in range(len(x))), default=0.0)
    return [at - left for at in x]


def _apart(
    middles: Sequence[float], widths: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """The middles nearest to `middles`, in order, that leave room for boxes so wide."""
    offsets = [0.0]
    for a, b in pairwise(widths):
        offsets.append(offsets[-1] + (a + b) / 2 + _BESIDE)
    pools: list[tuple[float, float, int]] = []
    for at, offset, weight in zip(middles, offsets, weights):
        total, mass, count = weight * (at - offset), weight, 1
        while pools and pools[-1][0] / pools[-1][1] > total / mass:
            before = pools.pop()
            total, mass, count = total + before[0], mass + before[1], count + before[2]
        pools.append((total, mass, count))
    pooled = [total / mass for total, mass, count in pools for _ in range(count)]
    return [at + offset for at, offset in zip(pooled, offsets, strict=True)]


_SIZE, _SMALL = 12.0, 10.5
_LINE, _PAD, _STRIPE = 15.0, 8.0, 5.0
_MAX_WIDTH = 270.0
_MAX_READS, _MAX_OUTPUTS = 4, 3
_MARGIN = 8.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text in a box, and its class."""

    words: str
    class_: str
    size: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A box with its texts: `labels` above it, `lines` in it, and its size with both."""

    box: Box
    labels: tuple[str, ...]
    lines: tuple[Line, ...]
    width: float
    height: float

    @property
    def top(self) -> float:
        """Height of the labels."""
        return len(self.labels) * _LINE


def block_picture(graph: BlockGraph, mesh: Mesh) -> Markup:
    """The picture of a block."""
    boxes = [_drawn(graph, k, mesh) for k in range(len(graph.boxes))]
    paper = arrange(
        [(drawn.width, drawn.height) for drawn in boxes],
        [(arrow.start, arrow.end) for arrow in graph.arrows],
    )
    children: list[Markup] = []
    for arrow, passed in zip(graph.arrows, paper.arrows, strict=True):
        moved = any(read.is_moved for read in arrow.reads)
        tip = "\n".join(_read_words(read, mesh) for read in arrow.reads)
        children.append(_arrow(passed, moved, tip))
    for drawn, (x, y) in zip(boxes, paper.boxes, strict=True):
        children += _box(drawn, x + _MARGIN, y + _MARGIN, mesh)
    title = f"{graph.block}, {graph.phase}: ops and the shardings of what they read and make"
    return picture(paper.width + 2 * _MARGIN, paper.height + 2 * _MARGIN, title, children)


def _drawn(graph: BlockGraph, k: int, mesh: Mesh) -> Drawn:
    box = graph.boxes[k]
    moved = [
        f"read {sharding_text(read.read, mesh)}"
        for arrow in graph.arrows
        if arrow.end == k
        for read in arrow.reads
        if read.is_moved
    ]
    labels = tuple(dict.fromkeys(moved))
    ops = " · ".join(box.ops) if len(box.ops) < 5 else f"{len(box.ops)} ops: {' · '.join(box.ops)}"
    lines = [Line(box.module, "strong", _SIZE), Line(ops, "mute", _SMALL)]
    shown = sorted(box.reads, key=lambda read: not read.is_moved)[:_MAX_READS]
    for read in shown:
        lines += _lines(
            f"{read.name} {sharding_text(read.source_state or read.read, mesh)}", read, mesh
        )
    for output in box.makes[:_MAX_OUTPUTS]:
        lines.append(Line(f"makes {sharding_text(output.state, mesh)}", "", _SMALL))
        lines += [Line(f"→ {sharding_text(state, mesh)}", "moved", _SMALL) for state in output.sent]
    texts = [(line.words, line.size) for line in lines[:1] + lines[2:]]
    texts += [(label, _SMALL) for label in labels]
    stripes = _STRIPE * len(mesh)
    widest = max(text_width(words, size) for words, size in texts)
    width = min(max(widest + 2 * _PAD + stripes, 150.0), _MAX_WIDTH)
    height = len(labels) * _LINE + len(lines) * _LINE + 2 * _PAD
    return Drawn(box, labels, tuple(lines), width, height)


def _lines(words: str, read: TensorRead, mesh: Mesh) -> Iterator[Line]:
    yield Line(words, "", _SMALL)
    if read.is_moved:
        yield Line(f"→ {sharding_text(read.read, mesh)}", "moved", _SMALL)


def _read_words(read: TensorRead, mesh: Mesh) -> str:
    """`weight [S(0) on dp] → replicated`."""
    source = f"{sharding_text(read.source_state, mesh)} → " if read.is_moved else ""
    return f"{read.name} {source}{sharding_text(read.read, mesh)}"


def _output_text(output: TensorWrite, mesh: Mesh) -> str:
    sent = "".join(f" → {sharding_text(state, mesh)}" for state in output.sent)
    return f"makes {sharding_text(output.state, mesh)}{sent}"


def _box(drawn: Drawn, x: float, y: float, mesh: Mesh) -> Iterator[Markup]:
    left, top = x - drawn.width / 2, y + drawn.top
    for k, label in enumerate(drawn.labels):
        words = cut(label, _SMALL, drawn.width)
        yield text(x, y + k * _LINE + 11, words, "moved small halo", "middle")
    box = drawn.box
    tip = [box.module, " · ".join(box.ops), format_ns(box.time_ns)]
    tip += [f"reads {_read_words(read, mesh)}" for read in box.reads]
    tip += [f"{_output_text(output, mesh)} ({output.type})" for output in box.makes]
    height = drawn.height - drawn.top
    yield rect(left, top, drawn.width, height, "box", "\n".join(tip), 5)
    for k, class_ in enumerate(_stripes(box, mesh)):
        yield rect(left + k * _STRIPE, top, _STRIPE - 1, height, class_, "", 1)
    inside = left + _STRIPE * len(mesh) + _PAD
    room = left + drawn.width - inside - 3
    for k, line in enumerate(drawn.lines):
        size = "large" if line.size == _SIZE else "small"
        words = cut(line.words, line.size, room)
        yield text(
            inside, top + _PAD + k * _LINE + 11, words, f"inbox {size} {line.class_}".strip()
        )


def _stripes(box: Box, mesh: Mesh) -> list[str]:
    """Classes of the stripes: what the box makes first, by axis."""
    state = parsed(box.makes[0].state, mesh) if box.makes else None
    kinds = {"R": "whole", "P": "partial"}
    return [f"stripe axis{k} {kinds.get(p.kind, 'cut')}" for k, p in enumerate(state or ())]


def _arrow(passed: Sequence[Point], moved: bool, tip: str) -> Markup:
    """A smooth line downwards through all points, with a head."""
    moved_points = [(x + _MARGIN, y + _MARGIN) for x, y in passed]
    d = f"M{points(moved_points[:1])}"
    for (x, y), (to_x, to_y) in pairwise(moved_points):
        middle = (y + to_y) / 2
        d += f"C{points([(x, middle), (to_x, middle), (to_x, to_y)])}"
    x, y = moved_points[-1]
    head = f"M{points([(x - 3.5, y - 6), (x, y), (x + 3.5, y - 6)])}"
    return svg_path(d + head, "arrow moved" if moved else "arrow", tip)
