"""What is handed to the memory-efficient kernel, which `tests/cuda` runs on a GPU, and what is made
of its results: with formulas in its place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.ops.attention import backward_formulas, forward_formulas
from autopar.runtime.ops.efficient_attention import efficient_backward, efficient_forward
from tests.cuda.test_attention import KEYS, MASKS, ROWS

HEAD_DIM, HEADS, BATCH = 64, 8, 2
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    found = (q.float() @ k.float().transpose(-1, -2)) * HEAD_DIM**-0.5
    if bias is None:
        return found
    assert bias.dtype == q.dtype and bias.shape == found.shape and bias.isfinite().all()
    assert bias.stride(-1) == 1 and bias.stride(-2) * bias.element_size() % 16 == 0
    return found + bias.float()


def kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **how: Any) -> tuple[Any, ...]:
    assert how == {"compute_log_sumexp": True, "is_causal": False, "scale": None}
    found = scores(q, k, bias)
    out = torch.softmax(found, -1) @ v.float()
    return out.to(q.dtype), F.pad(torch.logsumexp(found, -1), (0, 28)), None, None


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor,
    *_: Any, scale: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    assert scale is None and lse.shape[-1] == 128 and (lse[..., ROWS:] == math.inf).all()
    weights = torch.exp(scores(q, k, bias) - lse[..., :ROWS, None])
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    inner = weights * (grad.float() @ v.float().transpose(-1, -2) - delta) * HEAD_DIM**-0.5
    return inner @ k.float(), inner.transpose(-1, -2) @ q.float(), weights.mT @ grad.float(), None


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_as_the_kernel_takes_them(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    aten: Any = torch.ops.aten
    monkeypatch.setattr(aten, "_scaled_dot_product_efficient_attention", kernel)
    monkeypatch.setattr(aten, "_scaled_dot_product_efficient_attention_backward", kernel_backward)
    torch.manual_seed(0)
    make = MASKS[name]
    mask = make(dtype) if make else None
    q, grad = (torch.randn(BATCH, HEADS, ROWS, HEAD_DIM).to(dtype) for _ in range(2))
    k, v = (torch.randn(BATCH, HEADS, KEYS, HEAD_DIM).to(dtype) for _ in range(2))
    if name == "added":
        grad[:, 2, 5] = 0  # of the lowest row, which gives keys no gradient
    exact = [t.double() for t in (q, k, v)]
    out, lse = forward_formulas(*exact, mask, None, None)
    grads = backward_formulas(grad.double(), *exact, out, lse, mask, None, None)
    found, found_lse = efficient_forward(q, k, v, mask, False, None)
    made = efficient_backward(grad, q, k, v, found, found_lse, mask, False, None)
    assert torch.equal(found_lse == -math.inf, lse == -math.inf)
    for ours, theirs in zip((found, *made), (out, *grads), strict=True):
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < TOLERANCES[dtype], float(error)


def test_the_kernels_are_as_they_are_called() -> None:
    forward = str(torch.ops.aten._scaled_dot_product_efficient_attention.default._schema)
    assert (
        "Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
        "float dropout_p=0., bool is_causal=False, *, float? scale=None"
    ) in forward
    backward = str(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default._schema)
    assert (
        "Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, "
        "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
        "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None"
    ) in backward
