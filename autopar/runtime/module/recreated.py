"""Tensors that hooks make of parameters before each forward, as those of `torch.nn.utils.prune` and
of the `weight_norm` that is no parametrization do.

Hooks are part of a program, and what they set on a module is undone once the model is traced. A
script may read it all the same: `prune` takes the least values of `module.weight`. So it is made
again after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm


class RecreatedTensor(NamedTuple):
    """A tensor of a module, and what a hook makes of the module for it."""

    module: nn.Module
    name: str
    value: Callable[[nn.Module], Tensor]


def recreated_by_hooks(model: nn.Module) -> Iterator[RecreatedTensor]:
    """Those of a model whose hooks do nothing else."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                yield RecreatedTensor(module, hook._tensor_name, hook.apply_mask)
            elif isinstance(hook, WeightNorm):
                yield RecreatedTensor(module, hook.name, hook.compute_weight)


def remake(tensors: Iterable[RecreatedTensor]) -> None:
    """Gives the tensors the values of now; they stay the same objects of the same version, which
    is what guards look at."""
    for module, name, value in tensors:
        with torch.enable_grad():
            made = value(module)
        held = getattr(module, name, None)
        if isinstance(held, Tensor) and type(held) is type(made) and held.shape == made.shape:
            with torch.no_grad():
                held.data.copy_(made.detach())
        else:
            setattr(module, name, made)
