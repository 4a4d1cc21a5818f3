"""Forwards that do more than compute, and yet compute what eager computes."""

from __future__ import annotations

import random
import warnings

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from autopar.tracer.torch_private import assertion
from tests.tracer.forwards import Forward, Part


def telling(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    if y.isnan().any():
        warnings.warn("nan", stacklevel=2)
    return y.mean()


def shown(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    print(f"{y.mean():.3f} {y}")
    return y.mean()


def drawn(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    return m.line(x).mean() * (1 if random.random() < 1 else 2)


TOLD: dict[str, tuple[Forward, str]] = {
    "warning": (
        telling,
        r"prints or logs what depends on values \(.*forwards_that_work\.py:\d+\).*output",
    ),
    "text": (shown, r"makes text of a tensor \(.*forwards_that_work\.py:\d+\).* as an output"),
    "chance": (
        drawn,
        r"draws from Python's random \(.*forwards_that_work\.py:\d+\).*probability to 0",
    ),
}


def forces(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    x.requires_grad_()
    energy = m.line(x).tanh().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + force.square().mean()


def penalty(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(m.line(z).tanh().sum(), z, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + m.table(ids).mean()


def on_cpu(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    with save_on_cpu():
        return m.line(x).exp().mean()


def watched(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y = m.line(x)
    y.retain_grad()
    y.register_hook(lambda grad: grad * 2)
    with torch.profiler.record_function("square"):
        return y.square().mean()


def resized(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    y, twice = m.line(x), torch.empty(0)
    torch.mul(y.detach(), 2, out=twice)
    return (y * twice).mean()


def checked(m: Part, x: Tensor, ids: Tensor) -> Tensor:
    if ids.max().item() >= 16:
        raise ValueError("no such word")
    assert (ids >= 0).all()
    assertion((ids >= 0).all(), "no such word")
    torch._check(bool((ids >= 0).all()))
    return m.table(ids).square().mean()


WORKS: dict[str, Forward] = {
    "forces": forces,
    "penalty": penalty,
    "save_on_cpu": on_cpu,
    "hooks of activations": watched,
    "out of another shape": resized,
    "checks": checked,
    "numbers of tensors": lambda m, x, ids: (
        m.line(x) * torch.tensor([x[0, 0], 2, x[0, 1], ids[0, 0], x[1, 0], 1.5])
    ).mean(),
    "numpy of what is known": lambda m, x, ids: m.table(
        torch.from_numpy(torch.arange(4).numpy() % 3)
    ).mean(),
    "disabled": lambda m, x, ids: torch.compiler.disable(m.line)(x).mean(),
    "picked by a permutation": lambda m, x, ids: m.line(x)[torch.randperm(4)[:2]].sum(),
}
