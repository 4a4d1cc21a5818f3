"""How attention becomes one op, `autopar::sdpa`, while a model is traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.ops.attention import sdpa


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`: as one op where there is no dropout and the mask needs no
    gradient, otherwise spelled out."""
    query, key, value = (_autocast(t) for t in (query, key, value))
    attn_mask = attn_mask if attn_mask is None else _autocast(attn_mask)
    lead = query.shape[:-3]
    if query.dim() != 4:
        query, key, value = (_four_dims(t) for t in (query, key, value))
        attn_mask = (
            _four_dims(attn_mask) if attn_mask is not None and attn_mask.dim() > 2 else attn_mask
        )
    grouped = enable_gqa or key.shape[1] == query.shape[1]
    batched = query.shape[0] == key.shape[0] == value.shape[0]
    fused = dropout_p == 0 and batched and grouped and key.shape[1] == value.shape[1]
    if fused and (attn_mask is None or not attn_mask.requires_grad):
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        out = sdpa(query, key, value, attn_mask, is_causal, scale)[0]
    else:
        out = spelled_out(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])


def _autocast(x: Tensor) -> Tensor:
    """`x` as autocast, which knows `F.scaled_dot_product_attention` and not our op, hands it to
    that. The tensors of a trace are on the CPU."""
    if not torch.is_autocast_enabled("cpu") or x.dtype not in _CAST:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


_CAST = (torch.float32, torch.float16, torch.bfloat16)


def _four_dims(x: Tensor) -> Tensor:
    """[..., heads, S, D] with one batch dim."""
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)


def spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention as matmul, softmax, dropout, matmul. Key heads are repeated for the query heads
    that share them. Rows that attend to nothing are 0."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * factor
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask
    softmax = torch.softmax if mask is None else torch.ops.aten._safe_softmax.default
    weights = softmax(scores, -1)
    return torch.matmul(F.dropout(weights, dropout_p) if dropout_p else weights, value)


def transformers_attention(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What `transformers` takes for attention by sdpa: [B, heads, S, D] in, [B, S, heads, Dv] out.
    Key and value heads are not repeated, with a mask or without. What it does not know it leaves to
    `otherwise`, the function that it stands for."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if any(kwargs.get(name) is not None for name in _UNUSUAL):
            given = (query, key, value, attention_mask, dropout, scaling, is_causal)
            return otherwise(module, *given, **kwargs)
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        causal = is_causal and query.shape[2] > 1 and attention_mask is None
        given = (query, key, value, attention_mask, dropout, causal, scaling)
        return attend(*given, enable_gqa=True).transpose(1, 2).contiguous(), None

    return attention


_UNUSUAL = ("softcap", "position_bias", "cache")
