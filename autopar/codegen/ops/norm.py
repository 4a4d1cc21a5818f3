"""Norms over dims that are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.codegen.ops.peers import Emitters, Peers
from autopar.rules.work import exchanged_dims

aten = torch.ops.aten


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
    """The gradients of x, weight and bias that `mask` asks for, with `normal` = (x - mean) rstd.
    With g = grad weight, that of x is rstd (g - mean(g) - normal mean(g normal)), without mean(g)
    unless `centred`."""
    grad, dims = p.cast(grad, p.sums_in), _row_dims(p)
    scaled = grad if weight is None else p(aten.mul.Tensor, grad, weight)
    along = _mean(p, p(aten.mul.Tensor, scaled, normal), dims)
    rest = p(aten.sub.Tensor, scaled, p(aten.mul.Tensor, normal, along))
    if centred:
        rest = p(aten.sub.Tensor, rest, _mean(p, scaled, dims))
    gradients: list[fx.Node] = []
    if mask[0]:
        gradients.append(p.cast(p(aten.mul.Tensor, rest, rstd), p.dtype, given=p.sums_in))
    others = [d for d in range(len(p.shapes.inputs[0])) if d not in dims]
    for is_needed, summed in zip(mask[1:], (p(aten.mul.Tensor, grad, normal), grad), strict=False):
        if is_needed:
            total = p(aten.sum.dim_IntList, summed, others) if others else summed
            gradients.append(p.cast(total, p.dtype, given=p.sums_in))
    return gradients


NORM_EMITTERS: Emitters = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}
