"""Models that compute in float32 whatever they are given, made to compute in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Exact(TorchFunctionMode):
    """Every float32 that the model's code asks for (norms, softmax, losses of `transformers`) is a
    float64, so that what is compared may differ by rounding alone, 1e-16 and not 1e-7."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **named)
