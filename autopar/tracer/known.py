"""Values that are known while a model is traced on fake tensors: those that follow from the code
alone, such as a default mask of ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.tracer import torch_private
from autopar.tracer.effects import Fakes

MAX_ELEMENTS = 1 << 20
"""No larger tensor is computed."""


class Known(Fakes):
    """Runs each op on fake tensors, and on known values too if all its inputs have them. Results of
    ops that draw random numbers, leave memory uninitialised, or change a tensor in place stay
    unknown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._values = WeakIdKeyDictionary()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the value of `tensor`, as the model sees it, is known."""
        return self._value(torch_private.functionless(tensor)) is not None

    def look(self, func: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """`func` of the value of `tensor`, which must be known."""
        value = self._value(torch_private.functionless(tensor))
        assert value is not None
        with torch_private.no_modes():
            return func(value)

    def _value(self, tensor: Tensor) -> Tensor | None:
        return self._values.get(tensor) if isinstance(tensor, torch_private.FakeTensor) else tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if isinstance(func, torch_private.HigherOrderOperator):
            return result
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs)):
                self._values.pop(tensor, None)
        elif _determined(func) and all(x.numel() <= MAX_ELEMENTS for x in _tensors(result)):
            self._learn(func, args, dict(kwargs or {}), result)
        return result

    def _learn(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        leaves, spec = torch_private.tree_flatten((args, kwargs))
        known = [self._value(x) if isinstance(x, Tensor) else x for x in leaves]
        if any(isinstance(x, Tensor) and k is None for x, k in zip(leaves, known, strict=True)):
            return
        real_args, real_kwargs = torch_private.tree_unflatten(known, spec)
        with torch_private.no_modes(), torch.no_grad():
            real = func(*real_args, **real_kwargs)
        for fake, value in zip(_tensors(result), _tensors(real), strict=True):
            self._values[fake] = value


def _determined(func: Any) -> bool:
    """Whether an op's result follows from its arguments."""
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func._schema.name


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in torch_private.tree_flatten(value)[0] if isinstance(x, Tensor)]
