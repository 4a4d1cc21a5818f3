"""Attention on a GPU beside the formulas in float64, masked and not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.runtime.ops.attention import backward_formulas, forward_formulas, sdpa, sdpa_backward

pytestmark = pytest.mark.gpu

BATCH, ROWS, KEYS = 2, 100, 77
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def padding(_: torch.dtype) -> Tensor:
    """Of which the first sample's last row attends to nothing."""
    mask = torch.rand(BATCH, 1, ROWS, KEYS) < 0.6
    mask[..., 0] = True
    mask[0, 0, -1] = False
    return mask


def added(dtype: torch.dtype) -> Tensor:
    """Another for each head; rows that are all -inf, or all as low as can be."""
    mask = torch.randn(1, 8, ROWS, KEYS)
    mask[torch.rand(mask.shape) < 0.3] = -math.inf
    mask[..., 0] = 0.5
    mask[0, 1, 3] = -math.inf
    mask[0, 2, 5] = torch.finfo(dtype).min
    return mask.to(dtype)


def of_keys(_: torch.dtype) -> Tensor:
    return torch.arange(KEYS).reshape(1, 1, 1, KEYS) < 50


MASKS: dict[str, Callable[[torch.dtype], Tensor] | None] = {
    "none": None, "padding": padding, "added": added, "of keys": of_keys,
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", MASKS)
def test_as_by_the_formulas(name: str, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make = MASKS[name]
    mask = make(dtype) if make else None
    check(dtype, kv_heads, KEYS, mask, is_causal=False)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("keys", [ROWS, KEYS])
def test_causal(keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(dtype, 2, keys, None, is_causal=True)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_results_that_are_slices(dtype: torch.dtype) -> None:
    """As in zig-zag order, where halves of the lse are handed to backward."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(BATCH, 8, ROWS, 64).to(dtype).cuda() for _ in range(4))
    out, lse = sdpa(q, k, v, None, False, None)
    late = slice(ROWS // 2, None)
    rows = [x[:, :, late] for x in (grad, q, out, lse)]
    dense = [x.contiguous() for x in rows]
    for found, expected in zip(
        *(sdpa_backward(x[0], x[1], k, v, x[2], x[3], None, False, None) for x in (rows, dense)),
        strict=True,
    ):
        assert torch.equal(found, expected)


def check(
    dtype: torch.dtype, kv_heads: int, keys: int, mask: Tensor | None, *, is_causal: bool
) -> None:
    q, grad = (torch.randn(BATCH, 8, ROWS, 64).to(dtype) for _ in range(2))
    k, v = (torch.randn(BATCH, kv_heads, keys, 64).to(dtype) for _ in range(2))
    exact = [t.double() for t in (q, k, v)]
    if mask is not None and mask.dtype == dtype:
        grad[:, 2, 5] = 0  # of the lowest row, which gives keys no gradient
    past = 0 if is_causal else None
    out, lse = forward_formulas(*exact, mask, past, None)
    grads = backward_formulas(grad.double(), *exact, out, lse, mask, past, None)

    there = [t.cuda() for t in (q, k, v)]
    there_mask = None if mask is None else mask.cuda()
    found, found_lse = sdpa(*there, there_mask, is_causal, None)
    found_grads = sdpa_backward(grad.cuda(), *there, found, found_lse, there_mask, is_causal, None)
    assert torch.equal(found_lse.cpu() == -math.inf, lse == -math.inf)
    for ours, theirs in zip((found, *found_grads), (out, *grads), strict=True):
        error = (ours.double().cpu() - theirs).abs().max() / theirs.abs().max()
        assert error < TOLERANCES[dtype], float(error)
