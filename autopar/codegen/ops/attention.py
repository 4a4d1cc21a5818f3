"""Attention with a sharded sequence. Either the queries alone are sharded, or queries, keys and
values are sharded alike, and keys and values go round a ring.

After "Ring Attention with Blockwise Transformers" (arXiv:2310.01889). In step k a rank has the keys
and values of the rank k places before it. It sends them on before it computes with them, so that
the next ones arrive meanwhile. The results of the blocks are merged by lse. Backward starts from
the merged result. The gradients of a block of keys follow the block round the ring: from the second
rank on, each adds its part and sends the sum on. The last one sends it to the rank that the block
is from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers
from autopar.ir.choices import joint_axes
from autopar.ir.redistribute import nesting
from autopar.rules.attention import BACKWARD, FORWARD, RING, is_causal
from autopar.runtime.program.symbols import (
    Cuts,
    CutShard,
    attention_shard,
    attention_shard_backward,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
_SEQUENCE = 2


def _rows_forward(p: Peers) -> list[fx.Node]:
    """Causal attention of this rank's queries with all keys."""
    q, k, v, mask, _, scale = p.args
    return p.items(p(attention_shard, q, k, v, mask, scale, *_rows(p, 0)))


def _rows_backward(p: Peers) -> list[fx.Node]:
    """Its backward: what these queries add to the gradients of all keys and values."""
    grad, q, k, v, out, lse, mask, _, scale = p.args
    given = grad, q, k, v, out, lse, mask, scale
    return p.items(p(attention_shard_backward, *given, *_rows(p, 1)))


def _rows(p: Peers, query: int) -> tuple[CutShard, CutShard]:
    """This rank's shard of the queries, which are input `query`, and the whole sequence of keys."""
    (factor,) = (f for f in p.node.factors if f.positional and not f.members)
    cuts = _cuts(p, nesting(p.atoms[factor.atom], p.choice.axes_of((factor.name,))))
    length = p.shapes.local_inputs[query][_SEQUENCE]
    return CutShard(length, cuts), CutShard(p.shapes.inputs[query + 1][_SEQUENCE], ())


def _cuts(p: Peers, axes: tuple[int, ...]) -> Cuts:
    return tuple((p.mesh[axis].name, p.mesh[axis].size) for axis in axes)


def _ring(p: Peers) -> list[fx.Node]:
    """Attention of this rank's queries with the keys and values of all ranks of the axis."""
    q, k, v, _, _, scale = p.args
    return around(Ring.of(p, 0), q, k, v, scale)


def _ring_backward(p: Peers) -> list[fx.Node]:
    """The gradients of this rank's queries, keys and values."""
    grad, q, k, v, out, lse, _, _, scale = p.args
    return around_backward(Ring.of(p, 1), grad, q, k, v, out, lse, scale)


def around(ring: Ring, q: Any, k: Any, v: Any, scale: Any) -> list[fx.Node]:
    """(attention, lse) of `q` with the keys and values that come round."""
    p = ring.p
    out: Any = None
    lse: Any = None
    for step, keys, values in ring.blocks(k, v):
        more, more_lse = ring.attend(step, q, keys, values, scale)
        if step == 0:
            out, lse = p.cast(more, p.sums_in), more_lse
        else:
            total = p(aten.logaddexp.default, lse, more_lse)
            weights = [
                p(aten.unsqueeze.default, p(aten.exp.default, p(aten.sub.Tensor, own, total)), -1)
                for own in (lse, more_lse)
            ]
            out = p(
                aten.add.Tensor,
                p(aten.mul.Tensor, out, weights[0]),
                p(aten.mul.Tensor, more, weights[1]),
            )
            lse = total
    return [p.cast(out, p.dtype, given=p.sums_in), lse]


def around_backward(
    ring: Ring, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: Any
) -> list[fx.Node]:
    """The gradients of `q`, and of the keys and values that this rank began with."""
    p = ring.p
    own: Any = None
    dq: Any = None
    behind: fx.Node | None = None
    for step, keys, values in ring.blocks(k, v):
        more, dk, dv = ring.differentiate(step, grad, q, keys, values, out, lse, scale)
        dq = p.cast(more, p.sums_in) if dq is None else p(aten.add.Tensor, dq, more)
        part = ring.packed(dk, dv)
        if step == 0:
            own = part
        else:
            if behind is not None:
                part = p(aten.add.Tensor, part, p(c10d.wait_tensor.default, behind))
            behind = ring.passed_on(part)
    # In a ring of one rank nothing goes round.
    if behind is not None:
        own = p(aten.add.Tensor, own, p(c10d.wait_tensor.default, behind))
    return [p.cast(dq, p.dtype, given=p.sums_in), *ring.unpacked(own)]


@dataclass(frozen=True, slots=True)
class Ring:
    """The nodes of a ring over one axis. A block is keys and values in one list, which is sent as a
    whole; `shapes` are those of its two parts."""

    p: Peers
    causal: bool
    axis: str
    size: int
    length: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, p: Peers, query: int) -> Self:
        """The ring of the attention whose input `query` is the queries."""
        axis = p.mesh[joint_axes(p.node, p.choice)[0]]
        q, k, v = p.shapes.local_inputs[query : query + 3]
        return cls(p, is_causal(p.node), axis.name, axis.size, q[_SEQUENCE], (k, v))

    def blocks(self, k: Any, v: Any) -> Iterator[tuple[int, fx.Node, fx.Node]]:
        """(step, keys, values) of each rank's block, this rank's `k` and `v` first. The block is on
        its way to the next rank by then."""
        block = self.packed(k, v)
        for step in range(self.size):
            coming = self.passed_on(block) if step < self.size - 1 else None
            yield step, *self.unpacked(block)
            if coming is not None:
                block = self.p(c10d.wait_tensor.default, coming)

    def packed(self, k: Any, v: Any) -> fx.Node:
        """Position by position, as attention lays its tensors out."""
        p = self.p
        rows = (p(aten.transpose.int, x, 1, _SEQUENCE) for x in (k, v))
        return p(aten.cat.default, [p(aten.reshape.default, x, [-1]) for x in rows])

    def unpacked(self, block: fx.Node) -> tuple[fx.Node, fx.Node]:
        first, second = self.shapes
        return self._part(block, 0, first), self._part(block, prod(first), second)

    def _part(self, block: fx.Node, start: int, shape: tuple[int, ...]) -> fx.Node:
        """The tensor of `shape` that begins at `start` of a block."""
        batch, heads, length, last = shape
        part = self.p(aten.slice.Tensor, block, 0, start, start + prod(shape))
        rows = self.p(aten.view.default, part, [batch, length, heads, last])
        return self.p(aten.transpose.int, rows, 1, _SEQUENCE)

    def passed_on(self, block: fx.Node) -> fx.Node:
        """The block from the previous rank while `block` is sent to the next, to be waited for."""
        return self.p.permuted(block, sum(map(prod, self.shapes)))

    def attend(self, step: int, q: Any, k: fx.Node, v: fx.Node, scale: Any) -> list[fx.Node]:
        if self.causal:
            call = self.p(attention_shard, q, k, v, None, scale, *self._blocks(step))
        else:
            call = self.p(torch.ops.autopar.sdpa.default, q, k, v, None, False, scale)
        return self.p.items(call)

    def differentiate(self, step: int, *args: Any) -> list[fx.Node]:
        *given, scale = args
        if self.causal:
            call = self.p(attention_shard_backward, *given, None, scale, *self._blocks(step))
        else:
            call = self.p(torch.ops.autopar.sdpa_backward.default, *given, None, False, scale)
        return self.p.items(call)

    def _blocks(self, step: int) -> tuple[CutShard, CutShard]:
        cuts = ((self.axis, self.size),)
        return CutShard(self.length, cuts), CutShard(self.length, cuts, step)


ATTENTION_EMITTERS: Emitters = {
    FORWARD: _rows_forward,
    BACKWARD: _rows_backward,
    f"{FORWARD} {RING}": _ring,
    f"{BACKWARD} {RING}": _ring_backward,
}
