"""Calling the function that a target names: `build()` returns a model and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import TargetError

_RETURNS = "it must return (model, inputs), inputs a tuple, a dict or a function of the batch size"

_Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A model, and the inputs of one call: positional as a tuple, by keyword as a dict."""

    model: nn.Module
    inputs: _Inputs


def build(
    function: Callable[[], Any], global_batch: int | None, *, on_meta: bool, seed: int = 0
) -> Built:
    """What `function` returns, checked. TargetError says what is wrong with it.

    With `on_meta`, its tensors are on torch's meta device: a model of any size takes no memory, and
    has shapes but no values. Otherwise it is real, from random numbers that start at `seed`.
    """
    name = function.__name__
    torch.manual_seed(seed)
    with torch.device("meta") if on_meta else nullcontext():
        result = _call(function, name, on_meta)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TargetError(f"{name}() returned {_describe(result)}: {_RETURNS}")
        model, inputs = result
        if not isinstance(model, nn.Module):
            raise TargetError(f"{name}() returned {_describe(model)} for a model: {_RETURNS}")
        if callable(inputs) and not isinstance(inputs, (Mapping, torch.Tensor)):
            if global_batch is None:
                raise TargetError(
                    f"the inputs of {name}() depend on the batch: give --global-batch"
                )
            inputs = _call(lambda: inputs(global_batch), f"the inputs function of {name}", on_meta)
        elif global_batch is not None:
            raise TargetError(
                f"{name}() returned inputs of a fixed size: for --global-batch, return a function "
                "that takes the batch size and returns them"
            )
    return Built(model, _checked(inputs, name))


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call; keyword arguments in the order of their names, as they are planned.
    Anything but a mapping or a sequence is the only argument."""
    if isinstance(inputs, Mapping):
        return (), dict(sorted(inputs.items()))
    if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Sequence):
        return (inputs,), {}
    return tuple(inputs), {}


def _call(function: Callable[[], Any], name: str, on_meta: bool) -> Any:
    try:
        return function()
    except Exception as error:
        where = " on the meta device, where tensors have no values" if on_meta else ""
        raise TargetError(f"{name}() failed{where}: {type(error).__name__}: {error}") from error


def _checked(inputs: object, name: str) -> _Inputs:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, tuple):
        return inputs
    raise TargetError(f"{name}() returned {_describe(inputs)} for inputs: {_RETURNS}")


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
