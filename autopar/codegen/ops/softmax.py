"""Softmax, log-softmax and logsumexp over a sharded dim."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers

aten = torch.ops.aten


def _log_normalizer(p: Peers, x: fx.Node, dims: list[int]) -> fx.Node:
    """The log of the sum of exponentials along `dims` over all ranks; the dims stay, with size 1.
    Each rank sums its own elements first, so that ranks exchange one value per row, twice."""
    return shared_normalizer(p, p(aten.logsumexp.default, x, dims, True))


def shared_normalizer(p: Peers, own: fx.Node) -> fx.Node:
    """The log-normalizer over all ranks, from each rank's `own`."""
    largest = p.reduced(own, "max")
    # All of a row may be -inf, on one rank or on all.
    base = p(aten.masked_fill.Scalar, largest, p(aten.eq.Scalar, largest, float("-inf")), 0.0)
    total = p.reduced(p(aten.exp.default, p(aten.sub.Tensor, own, base)), "sum")
    return p(aten.add.Tensor, p(aten.log.default, total), base)


def _log_softmax(p: Peers) -> list[fx.Node]:
    x = p.cast(p.args[0], p.sums_in)
    return [_as_softmax(p, p(aten.sub.Tensor, x, _log_normalizer(p, x, [p.args[1]])))]


def _softmax(p: Peers) -> list[fx.Node]:
    x = p.cast(p.args[0], p.sums_in)
    less = p(aten.sub.Tensor, x, _log_normalizer(p, x, [p.args[1]]))
    return [_as_softmax(p, p(aten.exp.default, less))]


def _as_softmax(p: Peers, out: fx.Node) -> fx.Node:
    """`out` in the dtype of the op's output: the input's, or float32 of half precision if asked."""
    return out if p.arg(2, "half_to_float", False) else p.cast(out, p.dtype, given=p.sums_in)


def _logsumexp(p: Peers) -> list[fx.Node]:
    dims = [d % len(p.shapes.inputs[0]) for d in p.args[1]]
    log_sum = _log_normalizer(p, p.cast(p.args[0], p.sums_in), dims)
    if not p.arg(2, "keepdim", False):
        log_sum = p(aten.squeeze.dims, log_sum, dims)
    return [p.cast(log_sum, p.dtype, given=p.sums_in)]


def _log_softmax_backward(p: Peers) -> list[fx.Node]:
    grad, out = (p.cast(x, p.sums_in) for x in p.args[:2])
    total = p.reduced(p(aten.sum.dim_IntList, grad, [p.args[2]], True), "sum")
    spread = p(aten.mul.Tensor, p(aten.exp.default, out), total)
    return [p.cast(p(aten.sub.Tensor, grad, spread), p.args[3], given=p.sums_in)]


def _softmax_backward(p: Peers) -> list[fx.Node]:
    grad, out = (p.cast(x, p.sums_in) for x in p.args[:2])
    weighted = p(aten.mul.Tensor, grad, out)
    total = p.reduced(p(aten.sum.dim_IntList, weighted, [p.args[2]], True), "sum")
    grad_input = p(aten.sub.Tensor, weighted, p(aten.mul.Tensor, out, total))
    return [p.cast(grad_input, p.args[3], given=p.sums_in)]


SOFTMAX_EMITTERS: Emitters = {
    "aten._log_softmax.default": _log_softmax,
    "aten._softmax.default": _softmax,
    "aten.logsumexp.default": _logsumexp,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
}
