"""Functions of torch that are replaced while a model is traced.

Some are written out here, because torch's own look at values to check them, or are decomposed into
ops with another gradient at a kink, or are one op that cannot be sharded. Recurrent layers become
one op each, `autopar::recurrent`: their steps are not unrolled, and run in the device's own kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.ops.recurrent import RECURRENT_KINDS, recurrent
from autopar.runtime.replacing import replaced
from autopar.tracer.torch_private import AnyBatchNorm, weight_norm


def _checked(plain: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of `torch.linalg` whose result is NaN where torch's raises an error: `plain` gives
    the result, and an error code."""

    def computed(*args: Any, **kwargs: Any) -> Tensor:
        result, info = plain(*args, **kwargs)
        bad = (info != 0).reshape(info.shape + (1,) * (result.dim() - info.dim()))
        return torch.where(bad, torch.nan, result)

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
        average, reduces = size_average is not False, reduce is not False
        reduction = ("mean" if average else "sum") if reduces else "none"
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
    losses = torch.where(others, z, 0).sum(1) / x.shape[1]
    return _reduced(losses if target.dim() else losses.squeeze(0), reduction)


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
    """torch's function, without the check for negative variances."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    losses = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return _reduced(losses, reduction)


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
    matrix = _cov(input)
    if not matrix.dim():
        return matrix / matrix
    deviations = matrix.diagonal().real.sqrt()
    matrix = matrix / deviations.unsqueeze(1) / deviations
    if matrix.is_complex():
        return torch.complex(matrix.real.clamp(-1, 1), matrix.imag.clamp(-1, 1))
    return matrix.clamp(-1, 1)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v` scaled to the norms `g`: of each slice along `dim`, or of all of `v` if that is -1."""
    others = None if dim == -1 else [other for other in range(v.dim()) if other != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=others is not None))


def layers(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """torch.lstm, torch.gru and torch.rnn_*: layer by layer, with the dropout between them."""

    def call(*args: Any) -> tuple[Tensor, ...]:
        if len(args) != _ARGUMENTS or not isinstance(args[3], bool):
            return RECURRENT_KINDS[kind](*args)  # of packed sequences, whose lengths are data
        x, state, weights, biased, count, dropout, train, both, batch_first = args
        h, c = state if kind == "lstm" else (state, state.new_empty(0))
        directions = 2 if both else 1
        each = len(weights) // count
        x = x.transpose(0, 1) if batch_first else x
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(count):
            x = F.dropout(x, dropout, train) if layer and dropout else x
            own = slice(layer * directions, (layer + 1) * directions)
            begun = (h[own], c[own] if kind == "lstm" else c)
            x, *end = recurrent(kind, x, *begun, weights[layer * each : (layer + 1) * each], biased)
            last.append((end[0], end[1]))
        y = x.transpose(0, 1) if batch_first else x
        states = [torch.cat(ends) if count > 1 else ends[0] for ends in zip(*last, strict=True)]
        return (y, *states) if kind == "lstm" else (y, states[0])

    return call


_ARGUMENTS = 9
"""The number of arguments of a call on sequences of equal length."""


def cell(kind: str) -> Callable[..., Any]:
    """torch.lstm_cell and its like: a sequence of one step."""

    def call(x: Tensor, state: Any, *weights: Tensor | None) -> Any:
        h, c = state if kind == "lstm" else (state, state.new_empty(0))
        given: Sequence[Tensor] = [w for w in weights if w is not None]
        begun = (h[None], c[None] if kind == "lstm" else c)
        _, h, c = recurrent(kind, x[None], *begun, given, len(given) > _UNBIASED)
        return (h[0], c[0]) if kind == "lstm" else h[0]

    return call


_UNBIASED = 2
"""The number of weights of a cell without biases."""

INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
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
    torch.lstm: layers("lstm"),
    torch.gru: layers("gru"),
    torch.rnn_tanh: layers("rnn_tanh"),
    torch.rnn_relu: layers("rnn_relu"),
    torch.lstm_cell: cell("lstm"),
    torch.gru_cell: cell("gru"),
    torch.rnn_tanh_cell: cell("rnn_tanh"),
    torch.rnn_relu_cell: cell("rnn_relu"),
}


# Batch norms whose running statistics are the average of all batches so far (`momentum=None`), as
# `torch.optim.swa_utils.update_bn` has them.
#
# PyTorch reads the number of batches, which is known only when the model runs. Here the same
# average is computed from that number as a tensor.


def averages_as_tensors() -> AbstractContextManager[None]:
    """Inside, such norms can be traced."""
    return replaced((AnyBatchNorm, "forward", _averaging(AnyBatchNorm.forward)))


def averages(module: nn.Module) -> bool:
    """Whether a norm's running statistics are averages of all batches so far."""
    return getattr(module, "num_batches_tracked", None) is not None and module.momentum is None


def _averaging(plain: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not (averages(self) and self.training and self.track_running_stats):
            return plain(self, x)
        # The statistics of this batch alone, in tensors of their own, since backward saves the
        # tensors that they are written to.
        own = {name: self.get_buffer(name) for name in ("running_mean", "running_var")}
        of_batch = {name: each.clone() for name, each in own.items()}
        self._buffers.update(of_batch)
        self.momentum = 1.0
        try:
            y = plain(self, x)
        finally:
            self.momentum = None
            self._buffers.update(own)
        with torch.no_grad():
            # As exact as Python's number, which eager divides by.
            share = 1.0 / self.num_batches_tracked.double()
            for name, each in own.items():
                each.copy_(share * of_batch[name] + (1 - share) * each)
        return y

    return forward
