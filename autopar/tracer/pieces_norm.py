"""Batch norm and variances in pieces whose sums may be spread over ranks.

The statistics of a batch are sums over all of it, so that they are right however the batch is
sharded. With them given, batch norm in training is batch norm in inference, one fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_INFERENCE = aten._native_batch_norm_legit_no_training.default
_MASK = [True, True, True]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (like.dim() - 2))


def _moments(x: Tensor, dims: Sequence[int], correction: float) -> tuple[Tensor, Tensor]:
    """(variance, mean) of x over `dims`, which stay as dims of size 1. Squares are of distances
    from the mean: the mean of the squares less the square of the mean would cancel."""
    count = prod(x.shape[dim] for dim in dims)
    mean = x.sum([*dims], keepdim=True) / count
    distance = x - mean
    return (distance * distance).sum([*dims], keepdim=True) / max(0, count - correction), mean


def batch_norm_pieces(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit_functional: (y, mean, 1/std, new running mean, new running
    variance). The running variance is that of a sample, with n - 1."""
    if not training:
        if running_mean is None or running_var is None:
            return NotImplemented
        found = _INFERENCE(x, weight, bias, running_mean, running_var, momentum, eps)
        return *found, running_mean.clone(), running_var.clone()
    y, mean, invstd, var = _normalised(x, weight, bias, running_mean, momentum, eps)
    count = x.numel() // x.shape[1]
    if running_mean is not None and running_var is not None:
        running_mean = running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum
        sample = var * (count / max(1, count - 1))
        running_var = running_var * (1 - momentum) + sample.to(running_var.dtype) * momentum
    return y, mean, invstd, running_mean, running_var


def batch_norm_without_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit.no_stats: (y, mean, 1/std)."""
    if not training:
        return NotImplemented
    return _normalised(x, weight, bias, None, momentum, eps)[:3]


def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, mean, 1/std, variance). Statistics are in the dtype of weights and running statistics,
    if there are any, and computed in float32 at least."""
    like = next((t for t in (weight, state) if t is not None), x)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = _moments(exact, [0, *range(2, x.dim())], 0)
    invstd = torch.rsqrt(var + eps)
    mean, var, invstd = (t.flatten().to(like.dtype) for t in (mean, var, invstd))
    y = _INFERENCE(x, weight, bias, mean, var, momentum, eps)[0]
    return y, mean, invstd, var


def batch_norm_backward_pieces(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    invstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    """aten.native_batch_norm_backward: with the statistics held fixed, as in inference, and what
    they add as functions of x: dx -= w / std / n * (db + (x - mean) / std * dw)."""
    if not train or mean is None or invstd is None:
        return NotImplemented
    fixed = aten.native_batch_norm_backward.default
    var = 1 / (invstd * invstd) - eps
    dx, dw, db = fixed(grad, x, weight, mean, var, None, None, False, eps, _MASK)
    if mask[0]:
        scale = invstd / -(x.numel() // x.shape[1])
        if weight is not None:
            scale = scale * weight
        slope = _per_channel(scale * invstd * dw.to(scale.dtype), x)
        offset = _per_channel(scale * db.to(scale.dtype), x)
        moved = torch.addcmul(offset, x - _per_channel(mean, x), slope)
        dx = dx + moved.to(dx.dtype)
    found = (dx, dw, db)
    return tuple(t if want else None for t, want in zip(found, mask, strict=True))


def _variance(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    dims = [d % x.dim() for d in dim or range(x.dim())] if x.dim() else []
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    found = _moments(exact, dims, 1 if correction is None else correction)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    var, mean = (t.reshape(shape).to(x.dtype) for t in found)
    return var, mean


def variance(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """aten.var.correction."""
    return NotImplemented if x.is_complex() else _variance(x, *args, **kwargs)[0]


def deviation(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """aten.std.correction."""
    return NotImplemented if x.is_complex() else _variance(x, *args, **kwargs)[0].sqrt()


def variance_and_mean(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """aten.var_mean.correction: (variance, mean)."""
    return NotImplemented if x.is_complex() else _variance(x, *args, **kwargs)


NORM_PIECES: dict[Any, Any] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_pieces,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_stats,
    aten.native_batch_norm_backward.default: batch_norm_backward_pieces,
    aten.var.correction: variance,
    aten.std.correction: deviation,
    aten.var_mean.correction: variance_and_mean,
}
