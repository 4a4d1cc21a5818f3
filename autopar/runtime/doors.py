"""The one door to private torch APIs of the training process.

`tests/runtime/test_doors.py` holds the signature of each against the torch that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["TreeSpec", "default_store", "flatten", "inductor", "keeps_graph", "unflatten"]


def default_store() -> dist.Store:
    """The Store over which the default process group met."""
    return _get_default_store()


def keeps_graph() -> bool:
    """Inside a backward: whether the user asked for `retain_graph=True`."""
    return bool(_get_current_graph_task_keep_graph())


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested containers, and the form they were taken from."""
    return tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return tree_unflatten(leaves, spec)


def inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """`gm`, without gradients of its own, compiled by Inductor for inputs like `inputs`.

    The result takes a list, which it clears where Inductor's own code does.
    """
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        compiled: Any = compile_fx(gm, list(inputs))
    if getattr(compiled, "_boxed_call", False):
        return compiled

    def run(boxed: list[Any]) -> Sequence[Any]:
        values = tuple(boxed)
        boxed.clear()
        return compiled(*values)

    return run
