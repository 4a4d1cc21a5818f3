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
    """Whether a call of `torch.autograd.grad` with these arguments retains saved tensors."""
    return create_graph if retain_graph is None else retain_graph


@contextmanager
def spending_noted() -> Generator[list[bool], None, None]:
    """Yields a list with an item for each call of `torch.autograd.grad` inside that frees saved
    tensors. `is_spent` may be slow, and unpacking saved tensors has side effects."""
    spending: list[bool] = []
    grad = torch.autograd.grad

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not leaves_graph(*args, **kwargs):
            spending.append(True)
        return grad(*args, **kwargs)

    with replaced((torch.autograd, "grad", noted)):
        yield spending


def is_spent(tensor: Tensor) -> bool:
    """Whether an earlier backward has freed tensors saved in the graph of `tensor`: eager then
    raises its error for a second backward."""
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
    """Saved tensors of an autograd node are attributes with this prefix, or `saved_tensors` of a
    custom function."""
    for name in dir(node):
        if name == "saved_tensors" or name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False
