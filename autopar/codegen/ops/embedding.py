"""Embeddings of whose weight a rank has some rows or columns."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers

aten = torch.ops.aten


def _embedding(p: Peers) -> list[fx.Node]:
    """Rows of other ranks are zero: the sum over ranks is the embedding."""
    weight, indices = p.args[:2]
    rows = p.shapes.local_inputs[0][0]
    at, inside = p.local(indices, rows)
    vectors = p(aten.embedding.default, weight, p(aten.clamp.default, at, 0, rows - 1))
    outside = p(aten.unsqueeze.default, p(aten.logical_not.default, inside), -1)
    return [p(aten.masked_fill.Scalar, vectors, outside, 0.0)]


def _embedding_backward(p: Peers) -> list[fx.Node]:
    """Gradients of other ranks' rows go into an extra row, which the kernel leaves out as
    padding."""
    grad, indices, _, padding, by_frequency = p.args
    rows = p.shapes.local_outputs[0][0]
    at, inside = p.local(indices, rows)
    if padding >= 0:
        inside = p(aten.logical_and.default, inside, p(aten.ne.Scalar, indices, padding))
    at = p(aten.masked_fill.Scalar, at, p(aten.logical_not.default, inside), rows)
    grad_weight = p(aten.embedding_dense_backward.default, grad, at, rows + 1, rows, by_frequency)
    return [p(aten.slice.Tensor, grad_weight, 0, 0, rows)]


def _embedding_bag(p: Peers) -> list[fx.Node]:
    """The rank's columns; the other outputs are the same on all ranks."""
    return p.items(p(p.own_op(), *p.args, **p.kwargs))


EMBEDDING_EMITTERS: Emitters = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_forward_only.default": _embedding_bag,
}
