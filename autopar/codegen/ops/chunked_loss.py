"""Losses in chunks, of whose classes a rank has some."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers
from autopar.codegen.ops.softmax import shared_normalizer
from autopar.ir.loss_chunks import LINEAR, LINEAR_BACKWARD, SCORES, SCORES_BACKWARD
from autopar.runtime.ops.chunked_loss import ELSEWHERE

aten = torch.ops.aten

_IGNORED = -2
"""What stands for a target that is ignored, which is none of this rank's."""


def _own_targets(p: Peers, target: fx.Node, ignored: int, classes: int) -> fx.Node:
    """Targets counted in this rank's `classes`."""
    at, inside = p.local(target, classes)
    own = p(aten.masked_fill.Scalar, at, p(aten.logical_not.default, inside), ELSEWHERE)
    return p(aten.masked_fill.Scalar, own, p(aten.eq.Scalar, target, ignored), _IGNORED)


def _forward(p: Peers) -> list[fx.Node]:
    """Each rank sums its classes of every row; then the ranks do, for all rows at once."""
    *given, target, ignored, chunks = p.args
    classes = p.shapes.local_inputs[0][1] if len(given) == 1 else p.shapes.local_inputs[1][0]
    own = _own_targets(p, target, ignored, classes)
    found = p(_op(p, "_rows"), *given, own, _IGNORED, chunks)
    summed, scored = (p(operator.getitem, found, k) for k in range(2))
    rows = shared_normalizer(p, summed)
    lost = p(aten.sub.Tensor, rows, p.reduced(scored, "sum"))
    counted = p(aten.masked_fill.Scalar, lost, p(aten.eq.Scalar, target, ignored), 0.0)
    return [p(aten.sum.default, counted), rows]


def _backward(p: Peers) -> list[fx.Node]:
    *given, target, rows, grad, ignored, chunks = p.args
    own = _own_targets(p, target, ignored, p.shapes.local_outputs[1][0])
    found = p(_op(p), *given, own, rows, grad, _IGNORED, chunks)
    return [p(operator.getitem, found, k) for k in range(2)]


def _op(p: Peers, variant: str = "") -> Any:
    return getattr(torch.ops.autopar, p.node.op.split(".")[1] + variant).default


CHUNKED_LOSS_EMITTERS: Emitters = {
    LINEAR: _forward,
    LINEAR_BACKWARD: _backward,
    SCORES: _forward,
    SCORES_BACKWARD: _backward,
}
