"""Ops whose ranks talk to one another while they compute: the local ops and the all-reduces that
stand for an op of which an exchanged factor is sharded.

What is reduced, and in which order, is read from `autopar.exchange`, the list that was priced. To
add an op, enter it there and write one function here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import fx

from autopar.codegen.experts import experts, experts_exchange
from autopar.codegen.localize import Shapes
from autopar.codegen.ring import attention_rows, attention_rows_backward, ring, ring_backward
from autopar.ir import moe
from autopar.ir.attention import BACKWARD, FORWARD, RING
from autopar.ir.choices import Choice
from autopar.ir.graph import Atom, Node
from autopar.ir.intra_op import Exchange, exchange_axes, exchanged_dims, joint_name
from autopar.ir.redistribute import nesting
from autopar.plans.plan import MeshAxis
from autopar.runtime.program.symbols import local_position, permute

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_IGNORED = -1
"""What stands for a target that is not in this rank's classes: no local class has that number."""


@dataclass
class Peers:
    """Appends to `graph` what `node` does under `choice`, with tensors of `shapes` and the first
    input in `dtype`; `sent` is what it sends, in order."""

    graph: fx.Graph
    node: Node
    choice: Choice
    mesh: Sequence[MeshAxis]
    atoms: Sequence[Atom]
    shapes: Shapes
    dtype: torch.dtype
    sent: Sequence[Exchange]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self._sent = list(self.sent)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(op, args, kwargs)

    def emit(self) -> list[fx.Node]:
        """The local outputs, in order."""
        found = self._writer()(self)
        if self._sent:
            raise AssertionError(
                f"{self.node.op} was priced for {self._sent}, which it never sends"
            )
        return found

    def _writer(self) -> Callable[[Peers], list[fx.Node]]:
        for factor in self.node.factors:
            if factor.members and factor.name in self.choice.options:
                return _JOINT[self.node.op, joint_name(factor.name)]
        return _TABLE[self.node.op]

    def takes_part(self, kind: str, times: int) -> str:
        """The mesh axis along which an op that talks for itself sends `times` collectives of
        `kind`: all that it was priced for."""
        found, self._sent = self._sent, []
        axes = {each.axis for each in found}
        if [each.kind for each in found] != [kind] * times or len(axes) != 1:
            raise AssertionError(f"{self.node.op} sends {times} of {kind}, priced was {found}")
        return self.mesh[axes.pop()].name

    def reduced(self, rows: fx.Node, how: str) -> fx.Node:
        """One value per row, reduced over the axes that share the rows."""
        for _ in exchange_axes(self.node, self.choice):
            sent = self._sent.pop(0)
            if sent.reduce != how:
                raise AssertionError(f"{self.node.op} reduces by {how}, priced was {sent}")
            rows = self(c10d.all_reduce.default, rows, how, self.mesh[sent.axis].name)
            rows = self(c10d.wait_tensor.default, rows)
        return rows

    def permuted(self, x: fx.Node, length: int) -> fx.Node:
        """What the rank before has for `x`, a list of `length` elements; to be waited for."""
        sent = self._sent.pop(0)
        if sent.kind != "permute":
            raise AssertionError(f"{self.node.op} passes {x} on, priced was {sent}")
        axis = self.mesh[sent.axis]
        return self(permute, x, length, axis.size, axis.name)

    def local(self, indices: fx.Node, length: int) -> tuple[fx.Node, fx.Node]:
        """Indices into the exchanged dim, counted from the first of the `length` that this rank
        has, and whether each is among them."""
        (factor,) = (f for f in self.node.factors if f.exchanged and not f.members)
        axes = nesting(self.atoms[factor.atom], exchange_axes(self.node, self.choice))
        path = tuple((self.mesh[axis].name, self.mesh[axis].size) for axis in axes)
        at = self(local_position, indices, length, path)
        inside = self(aten.logical_and.default, self(aten.ge.Scalar, at, 0),
                      self(aten.lt.Scalar, at, length))  # fmt: skip
        return at, inside

    @property
    def sums_in(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def cast(self, x: fx.Node, dtype: torch.dtype, *, given: torch.dtype | None = None) -> fx.Node:
        """`x`, which is in `given` (by default in the dtype of the first input), in `dtype`."""
        return x if (given or self.dtype) == dtype else self(aten._to_copy.default, x, dtype=dtype)


def _log_normalizer(p: Peers, x: fx.Node, dims: list[int]) -> fx.Node:
    """The log of the sum of exponentials along `dims` of all ranks, kept as dims of size 1. Each
    rank's own sum is taken first, so that the ranks exchange one value per row twice."""
    own = p(aten.logsumexp.default, x, dims, True)
    largest = p.reduced(own, "max")
    # All of a row may be -inf, on one rank or on all.
    base = p(aten.masked_fill.Scalar, largest, p(aten.eq.Scalar, largest, float("-inf")), 0.0)
    total = p.reduced(p(aten.exp.default, p(aten.sub.Tensor, own, base)), "sum")
    return p(aten.add.Tensor, p(aten.log.default, total), base)


def _log_softmax(p: Peers) -> list[fx.Node]:
    x = p.cast(p.args[0], p.sums_in)
    out = p(aten.sub.Tensor, x, _log_normalizer(p, x, [p.args[1]]))
    return [_as_softmax(p, out)]


def _softmax(p: Peers) -> list[fx.Node]:
    x = p.cast(p.args[0], p.sums_in)
    out = p(aten.exp.default, p(aten.sub.Tensor, x, _log_normalizer(p, x, [p.args[1]])))
    return [_as_softmax(p, out)]


def _as_softmax(p: Peers, out: fx.Node) -> fx.Node:
    """`out` in the dtype of the op's output: the input's, or float32 of half precision if asked."""
    return out if p.arg(2, "half_to_float", False) else p.cast(out, p.dtype, given=p.sums_in)


def _logsumexp(p: Peers) -> list[fx.Node]:
    rank = len(p.shapes.inputs[0])
    dims = [d % rank for d in p.args[1]]
    found = _log_normalizer(p, p.cast(p.args[0], p.sums_in), dims)
    if not p.arg(2, "keepdim", False):
        found = p(aten.squeeze.dims, found, dims)
    return [p.cast(found, p.dtype, given=p.sums_in)]


def _log_softmax_backward(p: Peers) -> list[fx.Node]:
    grad, out = (p.cast(x, p.sums_in) for x in p.args[:2])
    total = p.reduced(p(aten.sum.dim_IntList, grad, [p.args[2]], True), "sum")
    spread = p(aten.mul.Tensor, p(aten.exp.default, out), total)
    return [p.cast(p(aten.sub.Tensor, grad, spread), p.args[3], given=p.sums_in)]


def _softmax_backward(p: Peers) -> list[fx.Node]:
    grad, out = (p.cast(x, p.sums_in) for x in p.args[:2])
    weighted = p(aten.mul.Tensor, grad, out)
    total = p.reduced(p(aten.sum.dim_IntList, weighted, [p.args[2]], True), "sum")
    found = p(aten.sub.Tensor, weighted, p(aten.mul.Tensor, out, total))
    return [p.cast(found, p.args[3], given=p.sums_in)]


def _row_dims(p: Peers) -> list[int]:
    return sorted(exchanged_dims(p.node))


def _mean(p: Peers, x: fx.Node, dims: list[int]) -> fx.Node:
    """The mean over `dims` on all ranks."""
    total = p.reduced(p(aten.sum.dim_IntList, x, dims, True), "sum")
    return p(aten.div.Scalar, total, float(prod(p.shapes.inputs[0][d] for d in dims)))


def _normal(p: Peers, normal: fx.Node, weight: Any, bias: Any) -> fx.Node:
    if weight is not None:
        normal = p(aten.mul.Tensor, normal, weight)
    if bias is not None:
        normal = p(aten.add.Tensor, normal, bias)
    return p.cast(normal, p.dtype, given=p.sums_in)


def _layer_norm(p: Peers) -> list[fx.Node]:
    x, _, weight, bias, eps = p.args
    x, dims = p.cast(x, p.sums_in), _row_dims(p)
    mean = _mean(p, x, dims)
    centred = p(aten.sub.Tensor, x, mean)
    variance = _mean(p, p(aten.mul.Tensor, centred, centred), dims)
    rstd = p(aten.rsqrt.default, p(aten.add.Scalar, variance, eps))
    return [_normal(p, p(aten.mul.Tensor, centred, rstd), weight, bias), mean, rstd]


def _rms_norm(p: Peers) -> list[fx.Node]:
    x, _, weight, eps = p.args
    x = p.cast(x, p.sums_in)
    square = _mean(p, p(aten.mul.Tensor, x, x), _row_dims(p))
    eps = torch.finfo(p.dtype).eps if eps is None else eps
    rstd = p(aten.rsqrt.default, p(aten.add.Scalar, square, eps))
    return [_normal(p, p(aten.mul.Tensor, x, rstd), weight, None), rstd]


def _layer_norm_backward(p: Peers) -> list[fx.Node]:
    grad, x, _, mean, rstd, weight, _, mask = p.args
    x = p.cast(x, p.sums_in)
    normal = p(aten.mul.Tensor, p(aten.sub.Tensor, x, mean), rstd)
    return _norm_gradients(p, grad, normal, rstd, weight, mask, centred=True)


def _rms_norm_backward(p: Peers) -> list[fx.Node]:
    grad, x, _, rstd, weight, mask = p.args
    normal = p(aten.mul.Tensor, p.cast(x, p.sums_in), rstd)
    return _norm_gradients(p, grad, normal, rstd, weight, mask, centred=False)


def _norm_gradients(
    p: Peers, grad: fx.Node, normal: fx.Node, rstd: fx.Node, weight: Any, mask: Sequence[bool],
    *, centred: bool,
) -> list[fx.Node]:  # fmt: skip
    """Of a normalised `normal` = (x - mean) rstd: with g = grad weight, the gradient of x is
    rstd (g - mean(g) - normal mean(g normal)), without mean(g) where no mean was taken off."""
    grad, dims = p.cast(grad, p.sums_in), _row_dims(p)
    scaled = grad if weight is None else p(aten.mul.Tensor, grad, weight)
    along = _mean(p, p(aten.mul.Tensor, scaled, normal), dims)
    rest = p(aten.sub.Tensor, scaled, p(aten.mul.Tensor, normal, along))
    if centred:
        rest = p(aten.sub.Tensor, rest, _mean(p, scaled, dims))
    found: list[fx.Node] = []
    if mask[0]:
        found.append(p.cast(p(aten.mul.Tensor, rest, rstd), p.dtype, given=p.sums_in))
    others = [d for d in range(len(p.shapes.inputs[0])) if d not in dims]
    for wanted, summed in zip(mask[1:], (p(aten.mul.Tensor, grad, normal), grad), strict=False):
        if wanted:
            total = p(aten.sum.dim_IntList, summed, others) if others else summed
            found.append(p.cast(total, p.dtype, given=p.sums_in))
    return found


def _embedding(p: Peers) -> list[fx.Node]:
    """Rows of other ranks are zero: the sum over ranks is the lookup."""
    weight, indices = p.args[:2]
    rows = p.shapes.local_inputs[0][0]
    at, inside = p.local(indices, rows)
    found = p(aten.embedding.default, weight, p(aten.clamp.default, at, 0, rows - 1))
    outside = p(aten.unsqueeze.default, p(aten.logical_not.default, inside), -1)
    return [p(aten.masked_fill.Scalar, found, outside, 0.0)]


def _embedding_backward(p: Peers) -> list[fx.Node]:
    """What is not of this rank goes into one more row, which the kernel leaves out as padding."""
    grad, indices, _, padding, by_frequency = p.args
    rows = p.shapes.local_outputs[0][0]
    at, inside = p.local(indices, rows)
    if padding >= 0:
        inside = p(aten.logical_and.default, inside, p(aten.ne.Scalar, indices, padding))
    at = p(aten.masked_fill.Scalar, at, p(aten.logical_not.default, inside), rows)
    found = p(aten.embedding_dense_backward.default, grad, at, rows + 1, rows, by_frequency)
    return [p(aten.slice.Tensor, found, 0, 0, rows)]


def _embedding_bag(p: Peers) -> list[fx.Node]:
    """The rank's columns; the other outputs are the same on all ranks."""
    found = p(getattr(aten, p.node.op.split(".")[1]).default, *p.args, **p.kwargs)
    return [p(operator.getitem, found, k) for k in range(len(p.node.outputs))]


def _own_targets(p: Peers, target: fx.Node, ignored: int, classes: int) -> fx.Node:
    """Targets counted in this rank's `classes`; `_IGNORED` for what is not here or is ignored."""
    at, inside = p.local(target, classes)
    counts = p(aten.logical_and.default, inside, p(aten.ne.Scalar, target, ignored))
    return p(aten.masked_fill.Scalar, at, p(aten.logical_not.default, counts), _IGNORED)


def _nll_loss(p: Peers) -> list[fx.Node]:
    """Each target is scored, and counted, by the rank that has its class."""
    scores, target, weight, reduce, ignored = p.args
    own = _own_targets(p, target, ignored, p.shapes.local_inputs[0][1 % len(p.shapes.inputs[0])])
    found = p(_loss(p.node.op), scores, own, weight, reduce, _IGNORED)
    return [p(operator.getitem, found, k) for k in range(2)]


def _nll_loss_backward(p: Peers) -> list[fx.Node]:
    grad, scores, target, weight, reduce, ignored, count = p.args
    classes = p.shapes.local_outputs[0][1 % len(p.shapes.outputs[0])]
    own = _own_targets(p, target, ignored, classes)
    return [p(_loss(p.node.op), grad, scores, own, weight, reduce, _IGNORED, count)]


def _loss(op: str) -> Any:
    return getattr(aten, op.split(".")[1]).default


_TABLE: dict[str, Callable[[Peers], list[fx.Node]]] = {
    "aten._log_softmax.default": _log_softmax,
    "aten._softmax.default": _softmax,
    "aten.logsumexp.default": _logsumexp,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_forward_only.default": _embedding_bag,
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
    moe.FORWARD: experts,
    moe.BACKWARD: experts,
    FORWARD: attention_rows,
    BACKWARD: attention_rows_backward,
}

_JOINT: dict[tuple[str, str], Callable[[Peers], list[fx.Node]]] = {
    **{(op, "exchange"): experts_exchange for op in sorted(moe.OPS)},
    (FORWARD, RING): ring,
    (BACKWARD, RING): ring_backward,
}
"""By op and name of a joint factor."""
