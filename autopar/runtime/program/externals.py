"""Tensors of the script that forward reads, and that require a gradient though they are no
parameters of the model: fast weights, prompts, what a hypernetwork made.

A program has them as inputs with a gradient, as it has parameters, whole on every rank. They are
attributes and buffers of modules, known by their names, and what is in lists, dicts, closures and
globals, known by numbers.
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
    """Whether an attribute or a buffer of a module is the script's, and has a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def external_name(number: int) -> str:
    """What an external tensor is called that no module has."""
    return f"{_PREFIX}{number}"


def external_number(name: str) -> int | None:
    """The number of an external tensor that no module has; None of any other name."""
    return int(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def whole_external(x: Tensor, device: Any) -> Tensor:
    """All of a tensor of the script's, plain, on a device: what comes back as its gradient goes on
    to what it was made of."""
    return (x.full_tensor() if isinstance(x, DTensor | ShardedOutput) else x).to(device)


def at_place(x: Tensor, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The same of what a script has put in the place of a parameter, as the program stores that.
    AutoparError where only some ranks do."""
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
    """Inside, functions of torch are given other tensors in the place of some, which are known by
    their identities; those that require a gradient and are not known are `met`."""

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


# What forward found in a list, a dict, a closure or a global, as rank 0 has it: ranks may have
# drawn other values.


def share_constants(gm: fx.GraphModule, device: torch.device) -> None:
    """Give the tensors that `gm` holds the values that rank 0 has, as parameters and buffers have
    them. A collective call; it goes by way of `device`."""
    for name in dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr")):
        value: Any = getattr(gm, name, None)
        if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            same = of_rank_0(value.detach().to(device)).to(value.device)
            delattr(gm, name)
            gm.register_buffer(name, same)


def share_externals(tensors: Iterable[Tensor], device: torch.device) -> None:
    """The same of the script's tensors that have a gradient, which stay the objects they are; what
    was computed from others is left alone, and compared in each call. A collective call."""
    for x in tensors:
        if type(x) in (Tensor, nn.Parameter) and x.is_leaf and x.layout == torch.strided:
            x.data.copy_(of_rank_0(x.detach().to(device)))
