"""One training step the eager way, and how far another is from it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.graph import Graph, Phase, Role
from autopar.runtime.comparison import Difference
from autopar.runtime.doors import flatten

TOLERANCES: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""The relative difference that rounding explains, by the least precise dtype of a step."""

NEGLIGIBLE = 1e-2
"""Gradients are measured against no less than this share of the largest of all: one that is zero
but for rounding (a bias that softmax cancels) has no precision of its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward and backward computes, whole. `outputs` are named "loss:0", as in
    `Program.forward_outputs`, and `gradients` as the parameters."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def whole_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Copies of all that goes into a step, named as in `Program.forward_inputs`.

    AutoparError if a tensor has no values.
    """
    named = {f"param:{name}": param for name, param in model.named_parameters()}
    named |= {f"buffer:{n}": b for n, b in model.named_buffers(remove_duplicate=False)}
    leaves, _ = flatten((args, kwargs))
    named |= {f"input:{i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for name, tensor in named.items():
        if tensor.is_meta:
            raise AutoparError(f"{name} is on the meta device: to compare, values are needed")
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def tangents(graph: Graph, seed: int, device: torch.device | None) -> dict[int, Tensor]:
    """What is to be differentiated: losses as they are, other outputs in a random direction."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Tensor] = {}
    for node in graph.with_role(Role.LOSS, Role.VALUE):
        kind = graph.type_of(node.inputs[0])
        direction = torch.ones(kind.shape, dtype=torch.float64)
        if node.role is Role.VALUE:
            direction = torch.randn(kind.shape, generator=generator, dtype=torch.float64)
        found[int(node.target)] = direction.to(device, getattr(torch, kind.dtype))
    return found


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """Inside, random numbers are those that follow `seed`; outside, as if none were drawn."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def eager_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: Graph,
    directions: Mapping[int, Tensor],
) -> Step:
    """The step by PyTorch alone, on a copy of the model. The graph says what its outputs are."""
    model = copy.deepcopy(model)
    for param in model.parameters():
        param.grad = None
    graded = any(node.phase is Phase.BACKWARD for node in graph.nodes)
    with torch.set_grad_enabled(graded):
        leaves, _ = flatten(model(*args, **kwargs))
    outputs = {
        f"{node.role.value}:{node.target}": leaves[int(node.target)]
        for node in graph.with_role(Role.LOSS, Role.VALUE, Role.DETACHED)
    }
    if graded:
        ends = [k for k in directions if leaves[k].requires_grad]
        torch.autograd.backward([leaves[k] for k in ends], [directions[k] for k in ends])
    buffers = dict(model.named_buffers(remove_duplicate=False))
    outputs |= {f"mutation:{n.target}": buffers[n.target] for n in graph.with_role(Role.MUTATION)}
    gradients = {
        node.target: _gradient(model.get_parameter(node.target))
        for node in graph.with_role(Role.GRAD)
    }
    return Step({name: tensor.detach() for name, tensor in outputs.items()}, gradients)


def _gradient(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def differences(found: Step, eager: Step) -> tuple[Difference, ...]:
    """How far `found` is from `eager`: outputs first, then gradients, the worst first in each."""
    largest = max((_largest(grad) for grad in eager.gradients.values()), default=0.0)
    outputs = [
        _difference(_describe(name), found.outputs.get(name), tensor, 0.0)
        for name, tensor in eager.outputs.items()
    ]
    gradients = [
        _difference(f"gradient of {name}", found.gradients.get(name), tensor, NEGLIGIBLE * largest)
        for name, tensor in eager.gradients.items()
    ]
    worst = [sorted(some, key=lambda d: (-d.relative, d.name)) for some in (outputs, gradients)]
    return tuple(worst[0] + worst[1])


def _describe(name: str) -> str:
    role, _, target = name.partition(":")
    if role == Role.MUTATION.value:
        return f"buffer {target}"
    return f"output {target}" + (" (loss)" if role == Role.LOSS.value else "")


def _difference(name: str, found: Tensor | None, eager: Tensor, floor: float) -> Difference:
    largest = _largest(eager)
    if found is None or found.shape != eager.shape:
        return Difference(name, float("inf"), largest)
    if eager.numel() == 0:
        return Difference(name, 0.0, 0.0)
    a, b = (x.detach().to("cpu", torch.float64) for x in (found, eager))
    same = (a == b) | (a.isnan() & b.isnan())
    distance = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max().item()
    scale = max(largest, floor)
    relative = distance / scale if scale else (float("inf") if distance else 0.0)
    return Difference(name, relative, largest)


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    finite = tensor.detach()[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
