"""Whether autograd can still go backward from a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
