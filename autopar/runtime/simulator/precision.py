"""Steps computed in another floating dtype than the one they were written in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.torch_private import TorchDispatchMode, tree_map

aten = torch.ops.aten

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_WIDENING = (aten._softmax.default, aten._log_softmax.default)
"""Ops whose third argument says that a half becomes a float."""


def in_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """`tensor` in the floating dtype called `dtype`, or as it is if it is not floating; complex
    numbers have parts of that dtype."""
    return tensor.to(_other(tensor.dtype, getattr(torch, dtype)))


def computing_in(dtype: str | None) -> AbstractContextManager[Any]:
    """Inside, all ops compute in the floating dtype called `dtype`, casts to another included; a
    model that computes in float32 whatever it is cast to computes in float64 here. None changes
    nothing."""
    return nullcontext() if dtype is None else _Computing(getattr(torch, dtype))


class _Computing(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.view.dtype:  # reads the same bits as something else
            return func(*args)
        args, kwargs = tree_map(self._cast, (args, kwargs or {}))
        if func in _WIDENING:
            args = (*args[:2], False)
        return tree_map(self._cast, func(*args, **kwargs))

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _other(value, self._dtype)
        if isinstance(value, Tensor) and _other(value.dtype, self._dtype) != value.dtype:
            return value.to(_other(value.dtype, self._dtype))
        return value


def _other(dtype: torch.dtype, floating: torch.dtype) -> torch.dtype:
    if dtype in _FLOATING:
        return floating
    return floating.to_complex() if dtype in _COMPLEX else dtype
