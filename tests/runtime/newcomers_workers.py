"""Parameters that are new to a model after it was compiled: the processes of
`test_newcomers.py`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn.utils import parametrizations, prune

import autopar
from tests.runtime.changes_workers import refusal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


class Lora(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner.requires_grad_(False), made(8, 2), made(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def made(*shape: int) -> nn.Linear:
    """The values are not those that other ranks have: those of rank 0 count."""
    layer = nn.Linear(*shape)
    if dist.get_rank():
        with torch.no_grad():
            layer.weight.add_(1)
    return layer


def _untie(net: Any, _: Any) -> None:
    net.b.weight = nn.Parameter(net.a.weight.detach().clone())


def _tie_again(net: Any, x: Tensor) -> None:
    _untie(net, x)
    net(x)
    net.b.weight = net.a.weight


def _append(net: Any, _: Any) -> None:
    net.b = nn.Sequential(net.b, made(8, 8))


def prune_in_turns(net: Any, x: Tensor) -> None:
    """What is pruned next depends on what was trained since."""
    for _ in range(2):
        prune.l1_unstructured(net.a, "weight", amount=0.3)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            net(x).backward()
            optimizer.step()
    prune.random_unstructured(net.a, "weight", amount=0.3)


def _prune_for_good(net: Any, x: Tensor) -> None:
    prune.l1_unstructured(net.a, "weight", amount=0.3)
    net(x)
    prune.remove(net.a, "weight")


def _redistributed(net: Any, _: Any) -> None:
    value = net.a.weight.detach()
    if hasattr(value, "redistribute"):
        value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    net.a.weight = nn.Parameter(value)


CHANGES: dict[str, tuple[type[nn.Module], Callable[[Any, Tensor], Any]]] = {
    "pruned": (Net, lambda net, _: prune.l1_unstructured(net.a, "weight", amount=0.3)),
    "pruned twice": (Net, prune_in_turns),
    "pruned for good": (Net, _prune_for_good),
    "norm": (Net, lambda net, _: parametrizations.weight_norm(net.a)),
    "spectral": (Net, lambda net, _: parametrizations.spectral_norm(net.a)),
    "orthogonal": (Net, lambda net, _: parametrizations.orthogonal(net.a)),
    "untied": (Tied, _untie),
    "tied again": (Tied, _tie_again),
    "appended": (Net, _append),
    "another layer": (Net, lambda net, _: setattr(net, "b", made(8, 8))),
    "another weight": (Net, lambda net, _: setattr(net.a, "weight", made(8, 8).weight)),
    "lora": (Net, lambda net, _: setattr(net, "a", Lora(net.a))),
    "not read": (Net, lambda net, _: setattr(net.a, "more", nn.Parameter(torch.ones(3)))),
    "no bias": (Net, lambda net, _: setattr(net.a, "bias", None)),
    "redistributed": (Net, _redistributed),
}  # fmt: skip


def _trained(net: Any, x: Tensor, change: Callable[[Any, Tensor], Any], after: bool) -> list[Any]:
    """The loss and all parameters after three steps of the changed model."""
    if after:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(x).backward()
        optimizer.step()
    torch.manual_seed(3)
    change(net, x)
    loss = torch.zeros(())
    for _ in range(3):
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
    values = [*net.named_parameters()]
    return [loss.detach(), *(_whole(value).detach() for _, value in sorted(values))]


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _from_rank_0(values: list[Tensor]) -> list[Tensor]:
    for value in values:
        dist.broadcast(value, src=0)
    return values


FEW = ("pruned for good", "spectral", "orthogonal", "tied again", "appended", "lora", "no bias")
"""One of each kind: what takes a parameter's place or contents, makes it of others, or leaves it
out."""


def two() -> dict[str, Any]:
    """Few changes, after the first call, and what cannot be."""
    x = _begin()
    return {"wrong": _wrong(x, ((name, True) for name in FEW)), "told": told(x)}


def two_more() -> list[str]:
    """All other changes, and before the first call."""
    x = _begin()
    every = ((name, after) for name in CHANGES for after in (True, False))
    return _wrong(x, ((name, after) for name, after in every if not (after and name in FEW)))


def _begin() -> Tensor:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _wrong(x: Tensor, cases: Iterable[tuple[str, bool]]) -> list[str]:
    """Those after which a model trains otherwise than eager does."""
    wrong: list[str] = []
    for name, after in cases:
        kind, change = CHANGES[name]
        torch.manual_seed(0)
        eager = kind()
        net = autopar.compile(copy.deepcopy(eager), constraints={"strategy": "fsdp"})
        expected = _from_rank_0(_trained(eager, x, change, after))
        found = _trained(net, x, change, after)
        if len(found) != len(expected) or not all(map(torch.allclose, found, expected)):
            wrong.append(f"{name}, {'after' if after else 'before'} the first call")
    return wrong


def told(x: Tensor) -> dict[str, str]:
    """What is said of what cannot be."""
    shared = Net()
    shared.b.weight = nn.Parameter(shared.a.weight.detach())
    tied: Any = autopar.compile(Tied(), constraints={"strategy": "fsdp"})
    staged: Any = autopar.compile(Net(), pipeline={"stages": 2}, microbatches=1)
    staged(x)
    staged.b = made(8, 8)
    return {
        "memory": refusal(lambda: autopar.compile(shared)),
        "assigned": refusal(lambda: tied.load_state_dict(Tied().state_dict(), assign=True)),
        "staged": refusal(lambda: staged(x)),
    }
