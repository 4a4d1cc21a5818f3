"""The picture of a block: ops as boxes in layers, and what is redistributed between them.

A box has a stripe per mesh axis in the colour of the axis if what the box makes is sharded on it,
hatched if it is a partial sum, pale if replicated. An arrow along which a tensor is redistributed
is drawn strong, and the sharding it is read in stands above the box it leads to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from autopar.ir.mesh import Mesh
from autopar.ir.units import format_ns
from autopar.report.html.block_graph import BlockGraph, Box, Made, TensorRead
from autopar.report.html.layered import Point, arrange
from autopar.report.html.svg import cut, picture, points, rect, svg_path, text, text_width
from autopar.report.placed import parsed, sharding_text

_SIZE, _SMALL = 12.0, 10.5
_LINE, _PAD, _STRIPE = 15.0, 8.0, 5.0
_MAX_WIDTH = 270.0
_MAX_READS, _MAX_MADE = 4, 3
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
        lines += _lines(f"{read.name} {sharding_text(read.made or read.read, mesh)}", read, mesh)
    for made in box.makes[:_MAX_MADE]:
        lines.append(Line(f"makes {sharding_text(made.state, mesh)}", "", _SMALL))
        lines += [Line(f"→ {sharding_text(state, mesh)}", "moved", _SMALL) for state in made.sent]
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
    made = f"{sharding_text(read.made, mesh)} → " if read.is_moved else ""
    return f"{read.name} {made}{sharding_text(read.read, mesh)}"


def _made_words(made: Made, mesh: Mesh) -> str:
    sent = "".join(f" → {sharding_text(state, mesh)}" for state in made.sent)
    return f"makes {sharding_text(made.state, mesh)}{sent}"


def _box(drawn: Drawn, x: float, y: float, mesh: Mesh) -> Iterator[Markup]:
    left, top = x - drawn.width / 2, y + drawn.top
    for k, label in enumerate(drawn.labels):
        words = cut(label, _SMALL, drawn.width)
        yield text(x, y + k * _LINE + 11, words, "moved small halo", "middle")
    box = drawn.box
    tip = [box.module, " · ".join(box.ops), format_ns(box.time_ns)]
    tip += [f"reads {_read_words(read, mesh)}" for read in box.reads]
    tip += [f"{_made_words(made, mesh)} ({made.type})" for made in box.makes]
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
