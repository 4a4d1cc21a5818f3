"""Losses with sharded classes, whole and in chunks."""

from __future__ import annotations

import torch
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers
from autopar.codegen.ops.softmax import shared_normalizer
from autopar.ir.own_ops import LINEAR, LINEAR_BACKWARD, SCORES, SCORES_BACKWARD
from autopar.runtime.ops.chunked_loss import ELSEWHERE

aten = torch.ops.aten

_IGNORED = -1
"""Stands for a target that is not in this rank's classes: no local class has that number."""


def _own_targets(p: Peers, target: fx.Node, ignored: int, classes: int) -> fx.Node:
    """Targets counted in this rank's `classes`; `_IGNORED` for what is not here or is ignored."""
    at, inside = p.local(target, classes)
    counts = p(aten.logical_and.default, inside, p(aten.ne.Scalar, target, ignored))
    return p(aten.masked_fill.Scalar, at, p(aten.logical_not.default, counts), _IGNORED)


def _nll_loss(p: Peers) -> list[fx.Node]:
    """Each target is scored, and counted, by the rank that has its class."""
    scores, target, weight, reduce, ignored = p.args
    own = _own_targets(p, target, ignored, p.shapes.local_inputs[0][1 % len(p.shapes.inputs[0])])
    return p.items(p(p.own_op(), scores, own, weight, reduce, _IGNORED))


def _nll_loss_backward(p: Peers) -> list[fx.Node]:
    grad, scores, target, weight, reduce, ignored, count = p.args
    classes = p.shapes.local_outputs[0][1 % len(p.shapes.outputs[0])]
    own = _own_targets(p, target, ignored, classes)
    return [p(p.own_op(), grad, scores, own, weight, reduce, _IGNORED, count)]


LOSS_EMITTERS: Emitters = {
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
}

# Losses in chunks, with sharded classes.

_IGNORED_HERE = -2
"""Stands for an ignored target."""


def _targets_or_elsewhere(p: Peers, target: fx.Node, ignored: int, classes: int) -> fx.Node:
    """Targets counted in this rank's `classes`."""
    at, inside = p.local(target, classes)
    own = p(aten.masked_fill.Scalar, at, p(aten.logical_not.default, inside), ELSEWHERE)
    return p(aten.masked_fill.Scalar, own, p(aten.eq.Scalar, target, ignored), _IGNORED_HERE)


def _chunked_forward(p: Peers) -> list[fx.Node]:
    """Each rank sums over its classes of every row; then ranks reduce the sums, for all rows at
    once."""
    *given, target, ignored, chunks = p.args
    classes = p.shapes.local_inputs[0][1] if len(given) == 1 else p.shapes.local_inputs[1][0]
    own = _targets_or_elsewhere(p, target, ignored, classes)
    summed, scored = p.items(p(p.own_op("_rows"), *given, own, _IGNORED_HERE, chunks))
    rows = shared_normalizer(p, summed)
    lost = p(aten.sub.Tensor, rows, p.reduced(scored, "sum"))
    counted = p(aten.masked_fill.Scalar, lost, p(aten.eq.Scalar, target, ignored), 0.0)
    return [p(aten.sum.default, counted), rows]


def _chunked_backward(p: Peers) -> list[fx.Node]:
    *given, target, rows, grad, ignored, chunks = p.args
    own = _targets_or_elsewhere(p, target, ignored, p.shapes.local_outputs[1][0])
    return p.items(p(p.own_op(), *given, own, rows, grad, _IGNORED_HERE, chunks))


CHUNKED_LOSS_EMITTERS: Emitters = {
    LINEAR: _chunked_forward,
    LINEAR_BACKWARD: _chunked_backward,
    SCORES: _chunked_forward,
    SCORES_BACKWARD: _chunked_backward,
}
