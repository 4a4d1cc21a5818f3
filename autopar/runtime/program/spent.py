"""Whether autograd can still go backward from a tensor."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.replacing import replaced


def leaves_graph(
    _outputs: Any,
    _inputs: Any,
    _grads: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **_: Any,
) -> bool:
    """Whether a call of `torch.autograd.grad` with these arguments leaves what was saved."""
    return create_graph if retain_graph is None else retain_graph


@contextmanager
def spending_noted() -> Generator[list[bool], None, None]:
    """Gives a list that has an item for each call of `torch.autograd.grad` inside that gives up
    what was saved. `is_spent` may be dear, and what unpacks what was saved has effects."""
    spending: list[bool] = []
    grad = torch.autograd.grad

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not leaves_graph(*args, **kwargs):
            spending.append(True)
        return grad(*args, **kwargs)

    with replaced((torch.autograd, "grad", noted)):
        yield spending


def is_spent(tensor: Tensor) -> bool:
    """Whether what was saved for a backward from `tensor` was given up by one before, somewhere on
    the way: eager says then that one goes backward a second time."""
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _gave_up(node):
            return True
        pending += [following for following, _ in node.next_functions]
    return False


def _gave_up(node: Any) -> bool:
    """What a node of autograd saved are attributes whose names start so, and of a function of
    the user's `saved_tensors`."""
    for name in dir(node):
        if name == "saved_tensors" or name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False
