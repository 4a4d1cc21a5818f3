"""Matrix products of rows that are sorted into groups: one weight per group.

`ends` [E] (int32) says where the rows of each group end. CUDA's grouped kernel runs where it
applies; otherwise one product per group, for which the host waits for `ends`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED_BYTES = 16


def linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[R, O] of `rows` [R, C], each times its group's part of `weight` [E, O, C], transposed. Rows
    that stand after the last end must not be there."""
    if _has_kernel(rows, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    found = rows.new_empty(rows.shape[0], weight.shape[1])
    for group, (start, end) in enumerate(_spans(ends)):
        if end > start:
            torch.mm(rows[start:end], weight[group].t(), out=found[start:end])
    return found


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[E, O, C]: per group, `left` [R, O] transposed times `right` [R, C]."""
    if _has_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    found = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for group, (start, end) in enumerate(_spans(ends)):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=found[group])
    return found


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    stops: list[int] = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    """Whether the grouped kernel takes these: bfloat16, one dim dense, the other in whole steps of
    16 bytes."""
    return (
        rows.device.type == "cuda"
        and rows.dtype == other.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and rows.shape[0] > 0
        and _aligned(rows)
        and _aligned(other)
    )


def _aligned(x: Tensor) -> bool:
    dense = x.stride(-1) == 1 or x.stride(-2) == 1
    steps = [s for s in x.stride() if s != 1]
    at = x.data_ptr() % _ALIGNED_BYTES == 0
    return dense and at and all(s * x.element_size() % _ALIGNED_BYTES == 0 for s in steps)
