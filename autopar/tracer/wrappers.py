"""Wrappers that change how a function runs, and not what it computes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity

from autopar.ir.graph import Checkpointed
from autopar.tracer.torch_private import annotate, plain_checkpoints

CHECKPOINT_KEY = "autopar_checkpoint"
"""Where the `meta["custom"]` of a node that is made in a checkpoint has what is saved of it."""


@contextmanager
def unwrapped() -> Generator[None, None, None]:
    """Inside, `torch.utils.checkpoint` and compiled functions (`torch.compile`) just call the
    function that they wrap. A reentrant checkpoint would be a backward of its own, which no joint
    graph can hold. Another checkpoint would be in the graph twice, and a compiled function is a
    graph of its own. Nodes of checkpoints are labelled with `CHECKPOINT_KEY`."""
    CheckpointFunction.apply = _call
    try:
        with plain_checkpoints(_labelled), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        # It is inherited, and was never an attribute of the class itself.
        del CheckpointFunction.apply


_regions: list[Checkpointed] = []
"""Those that are being run, the innermost last."""


def region() -> Checkpointed:
    """What is saved of what is being run, as the model asks."""
    return _regions[-1] if _regions else ""


@contextmanager
def _labelled(checkpoint: Checkpointed) -> Generator[None, None, None]:
    _regions.append(checkpoint)
    try:
        with annotate({CHECKPOINT_KEY: checkpoint}):
            yield
    finally:
        _regions.pop()


def _call(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """As `CheckpointFunction.apply`, whose outputs have a gradient only if an argument has one."""
    check_backward_validity(args)
    graded = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(graded and torch.is_grad_enabled()), _labelled("whole"):
        return function(*args)
