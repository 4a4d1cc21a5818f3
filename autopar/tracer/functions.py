"""Functions of torch that are spelled out while a model is traced: they look at values to check
them, or are taken apart by torch into what has another gradient at a kink, or into one op of which
nothing can be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.tracer.torch_private import weight_norm


def _checked(plain: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of `torch.linalg` whose result is NaN where that has an error: `plain` gives the
    result, and what is wrong with it."""

    def computed(*args: Any, **kwargs: Any) -> Tensor:
        found, info = plain(*args, **kwargs)
        bad = (info != 0).reshape(info.shape + (1,) * (found.dim() - info.dim()))
        return torch.where(bad, torch.nan, found)

    return computed


_cholesky = _checked(torch.linalg.cholesky_ex)


def _old_cholesky(x: Tensor, upper: bool = False) -> Tensor:
    return _cholesky(x, upper=upper)


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The part of each class but the target is max(0, margin - x[target] + x)^p, without gradient
    where that is 0."""
    if size_average is not None or reduce is not None:
        average, kept = size_average is not False, reduce is not False
        reduction = ("mean" if average else "sum") if kept else "none"
    if p not in (1, 2):
        raise ValueError(f"multi_margin_loss: p is 1 or 2, and not {p}")
    x, y = torch.atleast_2d(input), torch.atleast_1d(target)
    chosen = y.unsqueeze(1)
    z = torch.relu(margin - x.gather(1, chosen) + x)
    if p == 2:
        z = z * z
    if weight is not None:
        z = z * weight[chosen]
    others = torch.arange(x.shape[1], device=x.device) != chosen
    found = torch.where(others, z, 0).sum(1) / x.shape[1]
    return _reduced(found if target.dim() else found.squeeze(0), reduction)


def _reduced(result: Tensor, reduction: str) -> Tensor:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return _REDUCTIONS[reduction](result)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "mean": Tensor.mean,
    "sum": Tensor.sum,
}


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """As torch has it, without looking whether a variance is negative."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    found = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        found = found + 0.5 * math.log(2 * math.pi)
    return _reduced(found, reduction)


def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Variables are rows, observations columns."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        count, centred = x.shape[1], x - x.mean(1, keepdim=True)
        weighted, degrees = centred, float(max(count - correction, 0))
    else:
        weights = given[0] if len(given) == 1 else given[0] * given[1]
        total = weights.sum()
        centred = x - (x * weights).sum(1, keepdim=True) / total
        weighted = centred * weights
        if aweights is None or correction == 0:
            degrees = total - correction
        else:
            degrees = total - correction * (weights * aweights).sum() / total
        degrees = degrees.clamp(min=0)
    return (centred @ weighted.mH / degrees).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    found = _cov(input)
    if not found.dim():
        return found / found
    deviations = found.diagonal().real.sqrt()
    found = found / deviations.unsqueeze(1) / deviations
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v` in its direction alone, of lengths `g`: of each slice along `dim`, or if that is -1 of
    all of it."""
    others = None if dim == -1 else [other for other in range(v.dim()) if other != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=others is not None))


SPELLED_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.cholesky: _cholesky,
    torch.linalg.inv: _checked(torch.linalg.inv_ex),
    torch.linalg.solve: _checked(torch.linalg.solve_ex),
    **dict.fromkeys((torch.inverse, Tensor.inverse), _checked(torch.linalg.inv_ex)),
    **dict.fromkeys((torch.cholesky, Tensor.cholesky), _old_cholesky),
    **dict.fromkeys((torch.cov, Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), _corrcoef),
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.multi_margin_loss: _multi_margin_loss,
    weight_norm: _weight_norm,
}
