"""Attention as one op: `autopar::sdpa` and its backward, the same in a graph for every device.

Queries are [B, Hq, S, D], keys [B, Hkv, T, D], values [B, Hkv, T, Dv]. Hq is a multiple of Hkv, and
query head h reads key head h // (Hq // Hkv). A mask is bool (False: not attended to) or added to
the scores, and broadcasts to [B, Hq, S, T]. `lse` [B, Hq, S] is the log of the sum of exponentials
of each row of scores. A causal row s attends to columns 0..s. Results and gradients lie in memory
as [B, S, H, D], which is what the projections around attention read and write.

The device's fused kernels run where they apply, and otherwise the formulas of
"FlashAttention" (arXiv:2205.14135, appendix B) on the whole score matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.ops import efficient_attention
from autopar.runtime.ops.operators import operator

_FLASH_CPU = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FLASH_CUDA = (torch.bfloat16, torch.float16)
_MAX_FLASH_CUDA_HEAD_DIM = 256


@operator(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float? scale)"
    " -> (Tensor, Tensor)"
)
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(attention, lse) of queries, keys and values."""
    if _flash_cpu(q, v, mask):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_strided(q, _spread(k, q), _spread(v, q)),
            0.0,
            is_causal,
            scale=scale,
        )
    elif _flash_cuda(q, k, v, mask, is_causal):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *_strided(q, k, v), 0.0, is_causal, False, scale=scale
        )[:2]
    elif efficient_attention.applies(q, v, mask, is_causal):
        q, k, v = _strided(q, _spread(k, q), _spread(v, q))
        out, lse = efficient_attention.efficient_forward(q, k, v, mask, is_causal, scale)
    else:
        out, lse = forward_formulas(q, k, v, mask, 0 if is_causal else None, scale)
    return by_position(out), lse.contiguous()


@operator(
    "sdpa_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? mask, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)"
)
def sdpa_backward(
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
    if _flash_cpu(q, v, mask):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out,
            *_strided(q, _spread(k, q), _spread(v, q)),
            out,
            lse,
            0.0,
            is_causal,
            scale=scale,
        )
        dk, dv = _gather(dk, k), _gather(dv, v)
    elif _flash_cuda(q, k, v, mask, is_causal):
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *_strided(grad_out, q, k, v, out),
            # The kernel reads it by its shape alone, whatever its strides: it may be a slice.
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            is_causal,
            unused,
            unused,
            scale=scale,
        )
    elif efficient_attention.applies(q, v, mask, is_causal):
        grad, q, keys, values, out = _strided(grad_out, q, _spread(k, q), _spread(v, q), out)
        dq, dk, dv = efficient_attention.efficient_backward(
            grad, q, keys, values, out, lse, mask, is_causal, scale
        )
        dk, dv = _gather(dk, k), _gather(dv, v)
    else:
        dq, dk, dv = backward_formulas(
            grad_out, q, k, v, out, lse, mask, 0 if is_causal else None, scale
        )
    return by_position(dq), by_position(dk), by_position(dv)


def _flash_cpu(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether the CPU's fused kernel takes these. Under a mask it does not define the lse of a row
    that attends to nothing."""
    return (
        q.device.type == "cpu"
        and q.dtype in _FLASH_CPU
        and q.shape[-1] == v.shape[-1]
        and mask is None
        and 0 not in (*q.shape, *v.shape)
    )


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether CUDA's fused kernel takes these: no mask, and a causal one is square."""
    return (
        q.device.type == "cuda"
        and q.dtype in _FLASH_CUDA
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= _MAX_FLASH_CUDA_HEAD_DIM
        and mask is None
        and (not is_causal or q.shape[2] == k.shape[2])
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and 0 not in (*q.shape, *v.shape)
    )


def _strided(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same, with the last dim dense, as the fused kernels ask."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def by_position(x: Tensor) -> Tensor:
    """The same tensor [B, H, S, D], in memory as [B, S, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Key or value heads, each repeated for every query head that reads it."""
    groups = q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def _gather(grad: Tensor, x: Tensor) -> Tensor:
    """The backward of `_spread`."""
    groups = grad.shape[1] // x.shape[1]
    return grad.unflatten(1, (x.shape[1], groups)).sum(2) if groups > 1 else grad


def _computed(*tensors: Tensor) -> list[Tensor]:
    """In the dtype that sums are taken in."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return [t.to(dtype) for t in tensors]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, past: int | None, scale: float) -> Tensor:
    """[B, Hkv, G, S, T] of grouped queries [B, Hkv, G, S, D] and keys [B, Hkv, 1, T, D]. Row s
    attends to columns 0..past + s, or to all."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if past is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + past)
        scores = scores.masked_fill(future, -math.inf)
    if mask is not None:
        full = (q.shape[0], q.shape[1] * q.shape[2], q.shape[3], k.shape[3])
        grouped = mask.expand(full).unflatten(1, q.shape[1:3])
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~grouped, -math.inf)
        else:
            scores = scores + grouped
    return scores


def _weights_of_rows(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax of rows all of whose columns are here, 0 in rows that attend to nothing."""
    return torch.softmax(scores, -1).masked_fill((lse == -math.inf).unsqueeze(-1), 0)


def _weights_by_lse(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows that attend to nothing."""
    empty = lse == -math.inf
    return torch.exp(scores - lse.masked_fill(empty, 0).unsqueeze(-1))


def forward_formulas(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(attention, lse), where row s attends to columns 0..past + s, or to all."""
    shape, dtype = q.shape, q.dtype
    q, k, v = _computed(q, k, v)
    q, k, v = q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2), v.unsqueeze(2)
    scores = _scores(q, k, mask, past, _scale(scale, shape[-1]))
    lse = torch.logsumexp(scores, -1)
    out = _weights_of_rows(scores, lse) @ v
    return out.flatten(1, 2).to(dtype), lse.flatten(1, 2)


def backward_formulas(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    past: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, under the same mask. With a mask, all columns of a
    row must be here. Then `lse` may be too imprecise for the log of a sum: the mask may add -1e9 to
    all scores of a row."""
    dtype, factor, heads = q.dtype, _scale(scale, q.shape[-1]), k.shape[1]
    q, k, v, grad_out, out = _computed(q, k, v, grad_out, out)
    q, grad_out, out, lse = (x.unflatten(1, (heads, -1)) for x in (q, grad_out, out, lse))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    scores = _scores(q, k, mask, past, factor)
    weights = (_weights_by_lse if mask is None else _weights_of_rows)(scores, lse)
    dv = (weights.transpose(-1, -2) @ grad_out).sum(2)
    delta = (grad_out * out).sum(-1, keepdim=True)
    dscores = weights * (grad_out @ v.transpose(-1, -2) - delta) * factor
    dq = (dscores @ k).flatten(1, 2)
    dk = (dscores.transpose(-1, -2) @ q).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _scale(scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else scale


def like_by_position(x: Tensor, last: int) -> Tensor:
    """An empty tensor like `x` [B, H, S, D] but for its last dim, in memory as [B, S, H, D]."""
    batch, heads, length = x.shape[:3]
    return x.new_empty((batch, length, heads, last)).transpose(1, 2)


@sdpa.register_fake
def empty_results(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """An empty (attention, lse)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return like_by_position(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=dtype)


@sdpa_backward.register_fake
def empty_gradients(
    _grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of queries, keys and values."""
    return tuple(like_by_position(x, x.shape[-1]) for x in (q, k, v))  # pyright: ignore[reportReturnType]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, *output)


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_lse is not None:
        raise NotImplementedError("autopar::sdpa: lse has no derivative")
    if grad_out is None:
        return (None,) * 6
    q, k, v, mask, out, lse = ctx.saved_tensors
    given = grad_out, q, k, v, out, lse, mask
    return *sdpa_backward(*given, ctx.is_causal, ctx.scale), None, None, None


sdpa.register_autograd(_differentiate, setup_context=_save)
sdpa_backward.refuse_autograd()
