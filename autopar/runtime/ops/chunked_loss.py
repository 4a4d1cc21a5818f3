"""The loss of a head with many classes, computed in chunks of its rows: `autopar::linear_nll` and
`autopar::scores_nll` with their backwards.

    scores = x @ w.T                       [N, V] of x [N, D] and w [V, D]
    rows   = logsumexp(scores)             [N]
    loss   = sum over n of rows[n] - scores[n, target[n]], but where target[n] is `ignored`

`linear_nll` has the scores of one chunk at a time, and its backward recomputes them. `scores_nll`
takes all scores, for scripts that read them, and copies one chunk at a time. Neither ever has the
gradient of all scores: backward computes those of x and w from each chunk at once. The gradient of
w is summed in float32, or in float64.

Sums over a row are taken in float32 (in float64 for float64), from scores in the dtype of x. A
target `ELSEWHERE` is not ignored; its class, and so its score, is on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.passes.loss_chunks import chunk_rows
from autopar.runtime.ops.operators import operator

ELSEWHERE = -(2**63) + 1
"""A number that no script uses as a target: -1, say, is out of bounds here as it is for torch."""


def _spans(rows: int, chunks: int) -> Iterator[slice]:
    size = chunk_rows(rows, chunks)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def sums_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which rows are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class _Head:
    """Computes the scores of a chunk, or slices those of all rows. If `is_fresh`, they were
    computed here, and may be overwritten."""

    scores: Callable[[slice], Tensor]
    is_fresh: bool

    def less(self, scores: Tensor, by: Tensor) -> Tensor:
        """`scores` minus one value per row, `by`, in its dtype: in place if allowed."""
        if scores.dtype == by.dtype:
            return scores.sub_(by) if self.is_fresh else scores - by
        if scores.device.type == "cpu":
            # There, a kernel of two dtypes makes copies of all of what it reads.
            return scores.to(by.dtype).sub_(by)
        return scores - by

    def rows(self, target: Tensor, ignored: int, chunks: int) -> tuple[Tensor, Tensor]:
        """(log of the sum of exponentials, score of the target or 0 if it has none) of each row."""
        parts = [self._rows(at, target[at], ignored) for at in _spans(len(target), chunks)]
        rows, own = (torch.cat(each) for each in zip(*parts, strict=True))
        return rows, own

    def _rows(self, at: slice, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        scores = self.scores(at)
        absent = (target == ignored) | (target == ELSEWHERE)
        places = target.masked_fill(absent, 0).unsqueeze(1)
        dtype = sums_dtype(scores)
        own = scores.gather(1, places).squeeze(1).to(dtype).masked_fill(absent, 0.0)
        largest = scores.amax(1, keepdim=True).to(dtype)
        # All of a row may be -inf.
        base = largest.masked_fill(largest == float("-inf"), 0.0)
        total = self.less(scores, base).exp_().sum(1)
        return total.log_().add_(base.squeeze(1)), own

    def gradient(
        self, at: slice, target: Tensor, rows: Tensor, grad: Tensor, ignored: int
    ) -> Tensor:
        """That of the scores of a chunk, in their dtype."""
        scores = self.scores(at)
        ignores = target == ignored
        absent = ignores | (target == ELSEWHERE)
        places = target.masked_fill(absent, 0).unsqueeze(1)
        scale = grad.to(rows.dtype).expand_as(rows).masked_fill(ignores, 0.0).unsqueeze(1)
        parts = self.less(scores, rows.unsqueeze(1)).exp_()
        taken = scale.masked_fill(absent.unsqueeze(1), 0.0)
        own = parts.gather(1, places).mul_(scale).sub_(taken).to(scores.dtype)
        if parts.dtype == scores.dtype:
            return parts.mul_(scale).scatter_(1, places, own)
        of_scores = scores if self.is_fresh else torch.empty_like(scores)
        if parts.device.type == "cpu":
            of_scores.copy_(parts.mul_(scale))
        else:
            torch.mul(parts, scale, out=of_scores)
        return of_scores.scatter_(1, places, own)


def _linear(x: Tensor, w: Tensor) -> _Head:
    return _Head(lambda at: x[at] @ w.t(), is_fresh=True)


def _given(scores: Tensor) -> _Head:
    return _Head(lambda at: scores[at], is_fresh=False)


def _loss(rows: Tensor, own: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return (rows - own).masked_fill(target == ignored, 0.0).sum(), rows


def _backward(
    head: _Head,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    rows: Tensor,
    grad: Tensor,
    ignored: int,
    chunks: int,
) -> tuple[Tensor, Tensor]:
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_w = torch.zeros_like(w, dtype=rows.dtype, memory_format=torch.contiguous_format)
    for at in _spans(len(target), chunks):
        of_scores = head.gradient(at, target[at], rows[at], grad, ignored)
        torch.mm(of_scores, w, out=of_x[at])
        if of_w.dtype == x.dtype:
            of_w.addmm_(of_scores.t(), x[at])
        else:
            of_w.add_(of_scores.t() @ x[at])
        del of_scores
    return of_x, of_w.to(w.dtype)


@operator("linear_nll_rows")
def linear_nll_rows(
    x: Tensor, w: Tensor, target: Tensor, ignored: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """The two terms of each row's loss: see `_Head.rows`."""
    return _linear(x, w).rows(target, ignored, chunks)


@operator("scores_nll_rows")
def scores_nll_rows(
    scores: Tensor, target: Tensor, ignored: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """As `linear_nll_rows`."""
    return _given(scores).rows(target, ignored, chunks)


@operator("linear_nll")
def linear_nll(
    x: Tensor, w: Tensor, target: Tensor, ignored: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """The loss, and the rows that backward needs."""
    return _loss(*_linear(x, w).rows(target, ignored, chunks), target, ignored)


@operator("scores_nll")
def scores_nll(scores: Tensor, target: Tensor, ignored: int, chunks: int) -> tuple[Tensor, Tensor]:
    """The loss, and the rows that backward needs."""
    return _loss(*_given(scores).rows(target, ignored, chunks), target, ignored)


@operator("linear_nll_backward")
def linear_nll_backward(
    x: Tensor, w: Tensor, target: Tensor, rows: Tensor, grad: Tensor, ignored: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """The gradients of x and w, where `grad` is that of the loss."""
    return _backward(_linear(x, w), x, w, target, rows, grad, ignored, chunks)


@operator("scores_nll_backward")
def scores_nll_backward(
    scores: Tensor, x: Tensor, w: Tensor, target: Tensor, rows: Tensor, grad: Tensor,
    ignored: int, chunks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and w, from which the scores were computed."""
    return _backward(_given(scores), x, w, target, rows, grad, ignored, chunks)


@linear_nll_rows.register_fake
@scores_nll_rows.register_fake
def _(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dtype = sums_dtype(x)
    return x.new_empty(x.shape[0], dtype=dtype), x.new_empty(x.shape[0], dtype=dtype)


@linear_nll.register_fake
@scores_nll.register_fake
def _(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dtype = sums_dtype(x)
    return x.new_empty((), dtype=dtype), x.new_empty(x.shape[0], dtype=dtype)


@linear_nll_backward.register_fake
def _(x: Tensor, w: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


@scores_nll_backward.register_fake
def _(scores: Tensor, x: Tensor, w: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)
