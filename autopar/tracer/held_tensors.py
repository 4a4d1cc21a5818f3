"""Tensors that a forward finds in the model, or around it, and that a program cannot train."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import SideEffectWarning, TraceError
from autopar.runtime.module.remade import remade_by_hooks
from autopar.runtime.program.guards import Read
from autopar.tracer import torch_private

_TRAINED = (
    "forward reads {name}, which requires a gradient and is no parameter of the model: a compiled "
    "model has gradients of its parameters alone, and this one would be lost. Make it a parameter "
    "of a module (self.w = nn.Parameter(w)), or detach() it. To call the model with other weights, "
    "as functional_call does, do it on the plain model: with model.unsharded(): ..."
)


_UNREGISTERED = (
    "forward reads {name}, a parameter that model.parameters() does not have, as of a module in a "
    "plain list: it stays what it is, the same on all ranks, and gets no gradient. To train it, "
    "keep modules in nn.ModuleList or nn.ModuleDict"
)


def check_constants(gm: fx.GraphModule, model: nn.Module) -> None:
    """TraceError if the graph holds a parameter or buffer of the model as a constant: the model
    found it where its state is not looked for, and would never see it change."""
    named = (*model.named_parameters(), *model.named_buffers())
    plain = (Tensor, nn.Parameter)
    names = {torch_private.storage_of(x): name for name, x in named if type(x) in plain}
    for node in gm.graph.find_nodes(op="get_attr"):
        value: Any = getattr(gm, node.target, None)
        name = names.get(torch_private.storage_of(value)) if type(value) in plain else None
        if name is not None:
            raise TraceError(
                f"forward reads {name} through a list or another object, "
                "where it would stay what it is now: read it as an attribute of its module, or "
                "keep the list as nn.ParameterList"
            )
        if torch.is_grad_enabled() and type(value) in plain and value.requires_grad:
            told = f"a tensor of shape {tuple(value.shape)}"
            if type(value) is Tensor:
                raise TraceError(_TRAINED.format(name=told))
            warnings.warn(SideEffectWarning(_UNREGISTERED.format(name=told)), stacklevel=2)


def check_trained(model: nn.Module, reads: Iterable[Read]) -> None:
    """TraceError if a tensor of a module that forward `reads` would have a gradient, and is no
    parameter."""
    made = {(id(each.module), each.name) for each in remade_by_hooks(model)}
    read = {(id(each.owner), each.name) for each in reads}
    for path, module in model.named_modules():
        for name, x in (vars(module) | module._buffers | module._parameters).items():
            known = isinstance(x, nn.Parameter) or (id(module), name) not in read - made
            if isinstance(x, Tensor) and x.requires_grad and not known:
                raise TraceError(_TRAINED.format(name=f"{path}.{name}" if path else name))
