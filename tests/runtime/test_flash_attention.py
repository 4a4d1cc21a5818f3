"""What is handed to CUDA's fused kernel, which `tests/cuda` runs on a GPU: with a look in its
place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.ops import attention


def test_the_lse_lies_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads it by its shape. In zig-zag order it is a slice."""
    seen: list[Tensor] = []

    def kernel_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                        *_: Any, scale: float | None) -> tuple[Tensor, ...]:  # fmt: skip
        seen.append(lse)
        return q, k, v

    aten: Any = torch.ops.aten
    monkeypatch.setattr(aten, "_scaled_dot_product_flash_attention_backward", kernel_backward)
    monkeypatch.setattr(attention, "_flash_cpu", lambda *_: False)
    monkeypatch.setattr(attention, "_flash_cuda", lambda *_: True)
    q, k, v, grad, out = (torch.zeros(2, 4, 6, 8) for _ in range(5))
    lse = torch.arange(2.0 * 4 * 12).view(2, 4, 12)[:, :, 6:]
    attention.sdpa_backward(grad, q, k, v, out, lse, None, False, None)
    (found,) = seen
    assert found.is_contiguous() and torch.equal(found, lse)
