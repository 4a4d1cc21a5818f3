"""Tensors of the script that forward reads, and that require a gradient though they are no
parameters of the model: fast weights, prompts, outputs of a hypernetwork.

They are inputs of a program with a gradient, as parameters are, whole on every rank. Attributes and
buffers of modules have their names; tensors in lists, dicts, closures and globals have numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError
from autopar.runtime.process.part_tensors import is_of_some_ranks, of_rank_0
from autopar.runtime.program.sharded import ShardedOutput
from autopar.runtime.torch_private import is_transformed

_PREFIX = "external-"
_KINDS = frozenset({Tensor, nn.Parameter, DTensor, ShardedOutput})


def is_external(value: Any) -> bool:
    """Whether an attribute or a buffer of a module is the script's, and requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def external_name(number: int) -> str:
    """The name of an external tensor that no module has."""
    return f"{_PREFIX}{number}"


def external_number(name: str) -> int | None:
    """The number of an external tensor that no module has; None of any other name."""
    return int(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def whole_external(x: Tensor, device: Any) -> Tensor:
    """All of a tensor of the script's, plain, on a device. Its gradient flows on to the tensors it
    was computed from."""
    return (x.full_tensor() if isinstance(x, DTensor | ShardedOutput) else x).to(device)


def at_place(x: Tensor, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that a script has put in the place of a parameter, sharded as the program stores
    that. AutoparError if only some ranks store it."""
    if isinstance(x, DTensor) and x.device_mesh == mesh:
        is_there = x.placements == tuple(placements)
        return x if is_there else x.redistribute(placements=placements)
    if is_of_some_ranks(mesh):
        raise AutoparError(
            f"{name} is in the place of a parameter that only one stage has, and is no tensor of "
            "that: call the plain model with it, with model.unsharded(): ..., or compile with "
            "pipeline.stages=1"
        )
    plain = whole_external(x, mesh.device_type)
    whole = DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements)


class Substitutes(TorchFunctionMode):
    """Inside, functions of torch get substitutes for tensors, by their identities. `met` is called
    with others that require a gradient."""

    def __init__(
        self, others: Mapping[int, Tensor], met: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self._others, self._met = others, met

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {name: self._other(x) for name, x in kwargs.items()} if kwargs else {}
        return func(*map(self._other, args), **given)

    def _other(self, x: Any) -> Any:
        kind = type(x)
        if kind is list or kind is tuple:
            return kind(map(self._other, x))
        if not isinstance(x, Tensor):
            return x
        other = self._others.get(id(x))
        if other is not None:
            return other
        if self._met is not None and kind in _KINDS and x.requires_grad and not is_transformed(x):
            self._met(x)
        return x


# Tensors that forward found in lists, dicts, closures or globals get rank 0's values: ranks may
# have drawn others.


def share_constants(gm: fx.GraphModule, device: torch.device) -> None:
    """Give the tensors that `gm` holds rank 0's values, which parameters and buffers have already.
    A collective call, over `device`."""
    for name in dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr")):
        value: Any = getattr(gm, name, None)
        if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            same = of_rank_0(value.detach().to(device)).to(value.device)
            delattr(gm, name)
            gm.register_buffer(name, same)


def share_externals(tensors: Iterable[Tensor], device: torch.device) -> None:
    """The same for the script's tensors that require a gradient, which stay the same objects.
    Tensors computed from others are left alone, and compared in each call. A collective call."""
    for x in tensors:
        if type(x) in (Tensor, nn.Parameter) and x.is_leaf and x.layout == torch.strided:
            x.data.copy_(of_rank_0(x.detach().to(device)))
