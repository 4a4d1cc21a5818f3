"""Ops that torch composes of others in a way that is only right for tensors with memory.

torch looks where a result lies, or reads numbers from memory, before any tensor class sees an op.
With tensors in shards `matrix_rank` would leave what is given as `out=` as it was, `matmul` copies
a result of another shape, and `tensor_split` finds no memory to read. Here each is composed of ops
that tensor classes do see, for all tensors alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.torch_private import compose

aten = torch.ops.aten

_known: list[bool] = []


def know_composites() -> None:
    """From now on these ops are what they should be for any tensor."""
    if _known:
        return
    _known.append(True)
    compose("matmul.out", _into(aten.matmul.default))
    rank = aten.linalg_matrix_rank
    for name, op in (
        ("out", rank.default),
        ("out_tol_tensor", rank.tol_tensor),
        ("atol_rtol_tensor_out", rank.atol_rtol_tensor),
        ("atol_rtol_float_out", rank.atol_rtol_float),
    ):
        compose(f"linalg_matrix_rank.{name}", _into(op))
    compose("tensor_split.tensor_indices_or_sections", _split)


def _into(op: Any) -> Any:
    """`op` with `out=`: what it makes, copied."""

    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        made = op(*args, **kwargs)
        if out.shape != made.shape:
            out.resize_(made.shape)
        return out.copy_(made)

    return run


def _split(x: Tensor, at: Tensor, dim: int = 0) -> list[Tensor]:
    numbers: Any = at.tolist()
    return list(torch.tensor_split(x, numbers, dim))
