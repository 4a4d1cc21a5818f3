"""Attention by the memory-efficient kernel of CUDA, which takes masks and float32 where
FlashAttention takes neither. Shapes are those of `attention`, with as many key as query heads.

Under a mask, `lse` is that of scores minus the largest mask value of their row, as its backward
expects. So it is precise enough for the log of a sum where all of a row is -1e9. It is -inf in rows
that attend to nothing. If the mask adds so much to all of a row that the query-key products are
lost in rounding, they are left out. Such a row attends alike to all columns that it may, as in
eager, and contributes no gradient of keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16
"""Of the rows of queries, keys, values and masks."""
_LSE_BLOCK = 32
"""The kernel's rows of lse are filled up to a multiple of it."""
_LOST = -(2.0**26)
"""Numbers added to it in float32 are rounded to multiples of 8."""


def applies(q: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether the kernel takes these."""
    return (
        q.device.type == "cuda"
        and q.dtype in _DTYPES
        and all(x.shape[-1] * x.element_size() % _ALIGNED_BYTES == 0 for x in (q, v))
        and (mask is None or not is_causal)
        and 0 not in (*q.shape, *v.shape)
    )


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(attention, lse)."""
    bias = None
    if mask is not None:
        bias, q = _bias(mask, q, k), _without_lost_rows(q, mask)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, compute_log_sumexp=True, is_causal=is_causal, scale=scale
    )[:2]
    lse = lse[..., : q.shape[2]]
    if mask is not None:
        empty = _empty_rows(mask)
        out = out.masked_fill(empty.unsqueeze(-1), 0)
        lse = lse.masked_fill(empty, -math.inf)
    return out, lse


def efficient_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    bias = None
    if mask is not None:
        bias, q, empty = _bias(mask, q, k), _without_lost_rows(q, mask), _empty_rows(mask)
        # Their weights are exp(bias - 0), which is 0.
        lse = lse.masked_fill(empty, 0)
        grad_out = grad_out.masked_fill(empty.unsqueeze(-1), 0)
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_BLOCK), value=math.inf)
    undrawn = torch.zeros((), dtype=torch.int64)
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, bias, out, lse, undrawn, undrawn, 0.0, [True, True, True, False],
        is_causal, scale=scale,
    )  # fmt: skip
    return grads[:3]


def _empty_rows(mask: Tensor) -> Tensor:
    """[B or 1, H or 1, S or 1]: which rows attend to nothing."""
    return ~(mask if mask.dtype == torch.bool else mask != -math.inf).any(-1)


def _without_lost_rows(q: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return q
    largest = mask.amax(-1, keepdim=True)
    return q.masked_fill((largest <= _LOST) & (largest > -math.inf), 0)


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias on scores [B, H, S, T], without infinities, as the kernel requires it."""
    lowest = torch.finfo(q.dtype).min
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device)
        bias = bias.masked_fill(~mask, lowest)
    else:
        mask = mask.float()
        largest = mask.amax(-1, keepdim=True)
        bias = mask - largest.masked_fill(largest == -math.inf, 0)
        bias = bias.clamp(min=lowest).to(q.dtype)
    rows, keys = q.shape[2], k.shape[2]
    bias = bias.expand(*bias.shape[:-2], rows, keys)
    aligned = -keys % (_ALIGNED_BYTES // bias.element_size())
    filled = F.pad(bias, (0, aligned)) if aligned else bias.contiguous()
    return filled[..., :keys].expand(*q.shape[:2], rows, keys)
