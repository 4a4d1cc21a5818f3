"""Losses over classes of which a rank has some."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers

aten = torch.ops.aten

_IGNORED = -1
"""What stands for a target that is not in this rank's classes: no local class has that number."""


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


LOSS_EMITTERS: Emitters = {
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
}
