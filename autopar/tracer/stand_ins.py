"""Stand-ins for the parameters, buffers and other tensors of a model while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from autopar.runtime.checkpoint.initialise import state_tables
from autopar.runtime.module.executable import recreated_by_hooks
from autopar.runtime.program.externals import is_external
from autopar.runtime.program.guards import is_state
from autopar.tracer import torch_private

MOST_TRACES = 8
"""The most traces of a forward that are repeated because of discoveries in the one before."""


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Each further name of a parameter that has several, and the first."""
    named = list(model.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(named)}
    return {name: first[id(x)] for name, x in named if first[id(x)] != name}


def fake_tensor(x: Tensor, mode: torch_private.FakeTensorMode) -> Tensor:
    """A fake CPU tensor of x's global shape; of a parameter, a parameter."""
    with mode:
        return like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"), x)


def like(empty: Tensor, x: Tensor) -> Tensor:
    """`empty` as a parameter if x is one; else as a tensor that requires a gradient if x does."""
    if isinstance(x, nn.Parameter):
        return nn.Parameter(empty, x.requires_grad)
    return empty.requires_grad_(x.requires_grad)


def meta_tensor(x: Tensor) -> Tensor:
    """A tensor like x without memory; of a parameter, a parameter."""
    return like(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), x)


def replace_states(
    model: nn.Module,
    stand_in: Callable[[Tensor], Tensor],
    overwritten: Collection[tuple[int, str]] = (),
) -> frozenset[str]:
    """Put stand-ins in the place of parameters and buffers, one for all names of a tensor. Tensors
    that are plain attributes become buffers: a program has their values as inputs. Returns the
    names of external ones. Attributes that are `overwritten`, by module and name, have no
    gradient."""
    computed = {(id(each.module), each.name) for each in recreated_by_hooks(model)}
    computed |= set(overwritten)
    external: list[str] = []
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if is_state(value) or (is_external(value) and (id(module), name) not in computed):
                module._buffers[name] = vars(module).pop(name)
        for name, value in module._buffers.items():
            if value is not None and is_external(value) and (id(module), name) in computed:
                module._buffers[name] = value.detach()
        own = (name for name, value in module._buffers.items() if is_external(value))
        external += (f"{path}.{name}" if path else name for name in own)
    stand_ins: dict[int, Tensor] = {}
    for states in state_tables(model):
        for name, tensor in states.items():
            if tensor is not None:
                if id(tensor) not in stand_ins:
                    stand_ins[id(tensor)] = stand_in(tensor)
                states[name] = stand_ins[id(tensor)]
    return frozenset(external)
