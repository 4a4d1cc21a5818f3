"""The one door to private torch APIs of the training process.

`tests/runtime/test_doors.py` holds the signature of each against the torch that is installed.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = [
    "TorchDispatchMode",
    "TreeSpec",
    "default_store",
    "dtensor_like",
    "flatten",
    "hand_hooks",
    "inductor",
    "keeps_graph",
    "local_slices",
    "local_store",
    "tree_map",
    "unflatten",
    "without_dynamo",
]


def default_store() -> Store:
    """The Store over which the default process group met."""
    return _get_default_store()


def local_store() -> Store:
    """A Store of this process alone."""
    return HashStore()


def keeps_graph() -> bool:
    """Inside a backward: whether the user asked for `retain_graph=True`."""
    return bool(_get_current_graph_task_keep_graph())


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as this rank's piece of a DTensor laid out as `like` is, whose local shape and
    strides it has. `DTensor.from_local` takes seven times as long, for every gradient."""
    return DTensor(local, copy(like._spec), requires_grad=False)


def local_slices(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """Which rectangle of a tensor of `shape` this rank has of it as a DTensor, even or not."""
    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def hand_hooks(old: Tensor, new: Tensor) -> None:
    """The hooks that were registered on `old` for its gradient, on `new`; what `register_hook`
    returned removes them there."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    after: Any = old._post_accumulate_grad_hooks
    if after:
        new._post_accumulate_grad_hooks = after


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested containers, and the form they were taken from."""
    return tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return tree_unflatten(leaves, spec)


def inductor(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """`gm`, without gradients of its own, compiled by Inductor for inputs like `inputs`.

    Takes one list, which it clears: a graph whose only input is a list, marked to be stolen, is the
    form in which Inductor lets go of inputs before the graph ends.
    """
    from torch._inductor.compile_fx import compile_fx

    graph = fx.Graph()
    boxed = graph.placeholder("boxed")
    boxed.meta["steal_arg"] = True
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = {
        node: graph.call_function(operator.getitem, (boxed, i)) for i, node in enumerate(given)
    }
    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], values.__getitem__))
        elif node.op != "placeholder":
            values[node] = graph.node_copy(node, values.__getitem__)
    with torch.no_grad():
        given: Any = [list(inputs)]
        compiled: Any = compile_fx(fx.GraphModule(gm, graph), given)
    return compiled


def without_dynamo(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` made `model` from; `model` itself if it did not."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model.get_submodule("_orig_mod")
    return model
