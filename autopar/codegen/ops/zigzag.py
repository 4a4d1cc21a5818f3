"""Causal attention in zig-zag order, in which all ranks of an axis do equal work.

Of n ranks, r and its mirror n - 1 - r keep the first halves of their shards of the sequence, and
swap the second ones. Each then has two chunks of 2n, as far from the start as from the end. A
result is swapped back to where its rows came from. That is the order of context parallelism in
Megatron-LM and of "zigzag" ring attention, but for which rank has which two chunks: here one of
them is where it was.

Rows whose keys are all gathered are computed half by half. In a ring a block has the earlier of its
chunks first. Of the first block a rank computes what the mask leaves. Of any other block either all
rows see the earlier half of the keys and nothing of the later one, or the later half of the rows
sees all keys, and the earlier one none. That is one kernel without a mask, of equal work in each
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.codegen.ops.attention import Ring, around, around_backward
from autopar.codegen.ops.peers import Emitters, Peers
from autopar.ir.choices import joint_axes
from autopar.rules.attention import BACKWARD, FORWARD, RING_ZIGZAG, ZIGZAG
from autopar.runtime.program.symbols import (
    CutShard,
    Slice,
    attention_shard,
    attention_shard_backward,
    zigzag_block,
    zigzag_block_backward,
    zigzag_slice,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
_SEQUENCE = 2
_NUM_DIMS = 4
"""Of queries, keys, values, results and their gradients: batch, heads, sequence, head dim."""

Halves = tuple[fx.Node, fx.Node]
"""The first half of a shard, and the second."""


def _rows(p: Peers) -> list[fx.Node]:
    """Causal attention of this rank's rows in zig-zag order with all keys."""
    q, k, v, _, _, scale = p.args
    swap = _Swap.of(p, 0)
    (queries,) = swap.there([swap.halves(q)], [p.shapes.local_inputs[0]])
    outs, lses = zip(
        *(
            p.items(p(attention_shard, half, k, v, None, scale, rows, swap.keys))
            for half, rows in zip(queries, swap.rows, strict=True)
        ),
        strict=True,
    )
    halves = swap.there([outs, lses], p.shapes.local_outputs)
    return swap.whole(halves, p.shapes.local_outputs)


def _rows_backward(p: Peers) -> list[fx.Node]:
    """What these rows add to the gradients of all keys and values, and their own."""
    grad, q, k, v, out, lse, _, _, scale = p.args
    swap = _Swap.of(p, 1)
    shapes = [p.shapes.local_inputs[at] for at in (0, 1, 4, 5)]
    given = zip(*swap.there([swap.halves(x) for x in (grad, q, out, lse)], shapes), strict=True)
    (dq, dk, dv), (more_dq, more_dk, more_dv) = (
        p.items(p(attention_shard_backward, grad, q, k, v, out, lse, None, scale, rows, swap.keys))
        for (grad, q, out, lse), rows in zip(given, swap.rows, strict=True)
    )
    shapes = [p.shapes.local_outputs[0]]
    return [
        *swap.whole(swap.there([(dq, more_dq)], shapes), shapes),
        p(aten.add.Tensor, dk, more_dk),
        p(aten.add.Tensor, dv, more_dv),
    ]


def _ring(p: Peers) -> list[fx.Node]:
    """Attention of this rank's queries with the keys and values of all ranks of the axis."""
    *given, _, _, scale = p.args
    swap = _Swap.of(p, 0)
    q, k, v = swap.ordered(given, p.shapes.local_inputs)
    results = around(_ZigzagRing.of(p, 0), q, k, v, scale)
    return swap.back(results, p.shapes.local_outputs)


def _ring_backward(p: Peers) -> list[fx.Node]:
    """The gradients of this rank's queries, keys and values."""
    *given, _, _, scale = p.args
    swap = _Swap.of(p, 1)
    grad, q, k, v, out, lse = swap.ordered(given, p.shapes.local_inputs)
    results = around_backward(_ZigzagRing.of(p, 1), grad, q, k, v, out, lse, scale)
    return swap.back(results, p.shapes.local_outputs)


class _ZigzagRing(Ring):
    """A ring of shards in zig-zag order."""

    def attend(self, step: int, q: Any, k: fx.Node, v: fx.Node, scale: Any) -> list[fx.Node]:
        if step == 0:
            call = self.p(torch.ops.autopar.sdpa.default, q, k, v, None, True, scale)
        else:
            call = self.p(zigzag_block, q, k, v, scale, *self._block(step))
        return self.p.items(call)

    def differentiate(self, step: int, *args: Any) -> list[fx.Node]:
        *given, scale = args
        if step == 0:
            call = self.p(torch.ops.autopar.sdpa_backward.default, *given, None, True, scale)
        else:
            call = self.p(zigzag_block_backward, *args, *self._block(step))
        return self.p.items(call)

    def _block(self, step: int) -> tuple[int, int, int, str]:
        return step, self.length, self.size, self.axis


@dataclass(frozen=True, slots=True)
class _Swap:
    """Swaps the second halves of shards of `length` rows with the mirror, along an axis of `size`
    ranks. Keys are all `num_keys` of the sequence, where they do not go round."""

    p: Peers
    axis: str
    size: int
    length: int
    num_keys: int

    @staticmethod
    def of(p: Peers, query: int) -> _Swap:
        """For the attention whose input `query` is the queries."""
        axis = p.mesh[joint_axes(p.node, p.choice)[0]]
        length = p.shapes.local_inputs[query][_SEQUENCE]
        return _Swap(p, axis.name, axis.size, length, p.shapes.inputs[query + 1][_SEQUENCE])

    @property
    def kept(self) -> int:
        """Rows that a rank does not swap."""
        return self.length - self.length // 2

    @property
    def rows(self) -> tuple[CutShard, CutShard]:
        """The halves that a rank has in zig-zag order: its own first one, and the one that came."""
        cuts = ((self.axis, self.size),)
        came = CutShard(self.length, cuts, mirrored=True, skipped=self.kept)
        return CutShard(self.length, cuts), came

    @property
    def keys(self) -> CutShard:
        return CutShard(self.num_keys, ())

    def halves(self, x: Any) -> Halves:
        p, kept = self.p, self.kept
        first = p(aten.slice.Tensor, x, _SEQUENCE, 0, kept)
        return first, p(aten.slice.Tensor, x, _SEQUENCE, kept, self.length)

    def there(
        self, tensors: Sequence[Sequence[fx.Node]], shapes: Sequence[Sequence[int]]
    ) -> list[Halves]:
        """The first halves, and the mirror's second ones, of `tensors` whose shards have
        `shapes`."""
        came = self._swapped([second for _, second in tensors], shapes)
        return [(first, second) for (first, _), second in zip(tensors, came, strict=True)]

    def joined(self, *parts: fx.Node, num_dims: int) -> fx.Node:
        """The parts one after the other, as attention lays its tensors out."""
        dim = 1 if num_dims == _NUM_DIMS else _SEQUENCE
        rows = self.p(aten.cat.default, [self._by_position(part, num_dims) for part in parts], dim)
        return self._by_position(rows, num_dims)

    def ordered(self, tensors: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Iterator[fx.Node]:
        """The shards in zig-zag order, the earlier chunk first."""
        last = self.kept + self.length
        pairs = zip(self.there(list(map(self.halves, tensors)), shapes), shapes, strict=True)
        for (first, second), shape in pairs:
            both = self.joined(first, second, first, num_dims=len(shape))
            yield self._slice(both, (0, self.length), (self.kept, last))

    def back(self, tensors: Sequence[fx.Node], shapes: Sequence[Sequence[int]]) -> list[fx.Node]:
        """From zig-zag order."""
        given, length = self.length - self.kept, self.length
        halves = [
            (
                self._slice(x, (0, self.kept), (given, length)),
                self._slice(x, (self.kept, length), (0, given)),
            )
            for x in tensors
        ]
        return self.whole(self.there(halves, shapes), shapes)

    def whole(self, halves: Sequence[Halves], shapes: Sequence[Sequence[int]]) -> list[fx.Node]:
        """Shards of `shapes` from their halves."""
        pairs = zip(halves, shapes, strict=True)
        return [self.joined(*each, num_dims=len(shape)) for each, shape in pairs]

    def _slice(self, x: fx.Node, low: Slice, high: Slice) -> fx.Node:
        return self.p(zigzag_slice, x, _SEQUENCE, low, high, self.size, self.axis)

    def _swapped(self, halves: Sequence[fx.Node], shapes: Sequence[Sequence[int]]) -> list[fx.Node]:
        """The mirror's `halves` of shards of `shapes`. All of one dtype are in one message."""
        p = self.p
        came: dict[int, fx.Node] = {}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for at, shape in enumerate(shapes):
            # The lse has one dim less than the others, and is in the dtype of sums.
            dtype = p.dtype if len(shape) == _NUM_DIMS else p.sums_in
            by_dtype.setdefault(dtype, []).append(at)
        for positions in by_dtype.values():
            flat = [
                p(aten.reshape.default, self._by_position(halves[at], len(shapes[at])), [-1])
                for at in positions
            ]
            parts = [self._half(shapes[at]) for at in positions]
            length = sum(map(prod, parts))
            message = p(aten.cat.default, flat) if len(flat) > 1 else flat[0]
            received = p(c10d.wait_tensor.default, p.mirrored(message, length))
            start = 0
            for at, shape in zip(positions, parts, strict=True):
                part = p(aten.slice.Tensor, received, 0, start, start + prod(shape))
                came[at] = self._by_position(p(aten.view.default, part, shape), len(shape))
                start += prod(shape)
        return [came[at] for at in range(len(shapes))]

    def _half(self, shape: Sequence[int]) -> list[int]:
        """The shape of the swapped half of a shard of `shape`, position by position."""
        given = self.length - self.kept
        if len(shape) == _NUM_DIMS:
            batch, heads, _, last = shape
            return [batch, given, heads, last]
        return [*shape[:_SEQUENCE], given]

    def _by_position(self, x: fx.Node, num_dims: int) -> fx.Node:
        """Queries, keys, values and results position by position, or the other way round; the lse
        as it is."""
        return self.p(aten.transpose.int, x, 1, _SEQUENCE) if num_dims == _NUM_DIMS else x


ZIGZAG_EMITTERS: Emitters = {
    f"{FORWARD} {ZIGZAG}": _rows,
    f"{BACKWARD} {ZIGZAG}": _rows_backward,
    f"{FORWARD} {RING_ZIGZAG}": _ring,
    f"{BACKWARD} {RING_ZIGZAG}": _ring_backward,
}
