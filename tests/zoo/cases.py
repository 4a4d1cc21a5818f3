"""Models of the zoo traced once, with what eager makes of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.tracer import Traced, torch_private, trace
from tests.zoo import ZOO
from tests.zoo.exact import Exact

MOVED = 0.1
"""How far parameters are moved: biases and scales of 0 and 1 would hide one that is used twice."""


@dataclass(frozen=True)
class ZooCase:
    """A traced model; what `spmd.train_step` takes; eager's outputs by the names that a program
    gives them ("loss:0", "mutation:bn.running_mean"), and its gradients."""

    traced: Traced
    tensors: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the zoo in float64, and its inputs."""
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    doubled = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    return moved(model), doubled


def moved(model: nn.Module) -> nn.Module:
    """`model` in float64, with none of its parameters where it was initialised."""
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += MOVED * torch.randn_like(parameter)
    return model


@cache
def trained(name: str) -> ZooCase:
    """The model called `name` in training."""
    model, inputs = build(name)
    return make_case(model.train(), inputs)


@cache
def trained_on(samples: int, name: str) -> ZooCase:
    """The same of a batch of so many samples, those of the zoo again and again."""
    return on_samples(samples, *build(name))


def on_samples(samples: int, model: nn.Module, inputs: dict[str, Any]) -> ZooCase:
    """A model in training on so many samples, those of `inputs` again and again."""
    batch = next(iter(inputs.values())).shape[0]
    more = {k: torch.cat(-(-samples // batch) * [x])[:samples] for k, x in inputs.items()}
    return make_case(model.train(), more)


@cache
def evaluated(name: str) -> ZooCase:
    """The model called `name` in inference, where norms have seen a batch before."""
    model, inputs = build(name)
    with torch.no_grad():
        with Exact():
            model.train()(**inputs)
        return make_case(model.eval(), inputs)


def make_case(
    model: nn.Module, inputs: dict[str, Any], args: tuple[Any, ...] = (), *, exact: bool = True
) -> ZooCase:
    """What `model` makes of `args` and `inputs`, in autopar's words; the loss is the sum of all
    losses."""
    with Exact() if exact else nullcontext():
        traced = trace(model, args, inputs)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()}
    tensors |= {f"buffer:{n}": b.clone() for n, b in model.named_buffers()}
    flat, _ = torch_private.tree_flatten((args, inputs))
    tensors |= {f"input:{i}": x for i, x in enumerate(flat)}
    with Exact() if exact else nullcontext():
        leaves, _ = torch_private.tree_flatten(model(*args, **inputs))
    state = dict(model.named_buffers())
    named: dict[str, Tensor] = {}
    for node in traced.graph.nodes:
        if node.op == "output" and node.role != "grad":
            value = state[node.target] if node.role == "mutation" else leaves[int(node.target)]
            named[f"{node.role.value}:{node.target}"] = value
    losses = [x for key, x in named.items() if key.startswith("loss:") and x.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return ZooCase(traced, tensors, {k: x.detach() for k, x in named.items()}, gradients)
