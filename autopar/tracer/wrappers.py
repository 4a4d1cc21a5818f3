"""Wrappers that change how a function runs, and not what it computes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity


@contextmanager
def unwrapped() -> Generator[None, None, None]:
    """Inside, `torch.utils.checkpoint` with `use_reentrant=True` and what `torch.compile` made call
    the function that they wrap: the one is a backward of its own, which no joint graph can hold,
    the other a graph of its own."""
    CheckpointFunction.apply = _call
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        # It is inherited, and was never an attribute of the class itself.
        del CheckpointFunction.apply


def _call(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """As `CheckpointFunction.apply`, whose outputs have a gradient only if an argument has one."""
    check_backward_validity(args)
    graded = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(graded and torch.is_grad_enabled()):
        return function(*args)
