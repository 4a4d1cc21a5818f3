"""Optimizers, averages and hooks that were made before the model was compiled: what the processes
of `test_early.py` do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Adagrad, AdamW, Optimizer

import autopar
from tests.runtime.workers import RANK, Net, distance, error_of, net, points, slow_devices, whole


class Mine(Optimizer):
    """SGD with momentum, as somebody wrote it: none that autopar knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["sum"] = state.get("sum", torch.zeros_like(param)) * 0.9 + param.grad
                param.sub_(state["sum"] * group["lr"])


class Average:
    """Keeps a running average of the parameters that it was given, in lists and mappings."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.by_name = dict(model.named_parameters())
        self.sums = [0.0] * len(self.params)

    def update(self) -> None:
        self.sums = [
            total + float(whole(p).detach().sum())
            for total, p in zip(self.sums, self.params, strict=True)
        ]


def adamw(model: Net) -> Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-2},
    ]
    return AdamW(groups, lr=1e-3)


def script(make: Callable[[Net], Optimizer], before: int, *, compiled: bool) -> dict[str, Any]:
    """A script of one process, which trains `before` steps before the line that compiles."""
    model: Any = net()
    if compiled and RANK and not before:
        # Ranks start from other values: those of rank 0 are to hold.
        with torch.no_grad():
            model.up.weight.add_(1.0)
    optimizer, average = make(model), Average(model)
    model.down.weight.note = "kept"
    model.up.bias.requires_grad_(False)
    handle = model.up.weight.register_hook(lambda grad: grad * 2)
    for step in range(before + 3):
        if step == before and compiled:
            model = autopar.compile(model, cluster=slow_devices(2), mesh="2")
        if step == before + 2:
            handle.remove()
        optimizer.zero_grad()
        model(*points(seed=step))["loss"].backward()
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
        optimizer.step()
        if step >= before:
            average.update()
    assert model.down.weight.note == "kept"
    assert all(average.by_name[name] is p for name, p in model.named_parameters())
    params = dict(model.named_parameters())
    assert set(optimizer.state) <= set(params.values())
    return {"params": params, "sums": average.sums, "state": optimizer.state}


def far(make: Callable[[Net], Optimizer], before: int) -> float:
    """How far parameters and what was made of them end from those of one process."""
    ours, theirs = (script(make, before, compiled=yes) for yes in (True, False))
    assert any(
        isinstance(p, DTensor) and p.placements[0].is_shard() for p in ours["params"].values()
    )
    pairs: list[tuple[Tensor, Tensor]] = [
        (ours["params"][name], param) for name, param in theirs["params"].items()
    ]
    pairs.append((torch.tensor(ours["sums"]), torch.tensor(theirs["sums"])))
    for name, param in theirs["params"].items():
        for key, value in theirs["state"].get(param, {}).items():
            if isinstance(value, Tensor) and value.dim():
                pairs.append((ours["state"][ours["params"][name]][key], value))
    return max(distance(a, b) for a, b in pairs)


def loaded() -> float:
    """A state of one process, loaded into the optimizer of a compiled model."""
    reference = net()
    old = AdamW(reference.parameters())
    reference(*points())["loss"].backward()
    old.step()
    model = autopar.compile(copy.deepcopy(reference), cluster=slow_devices(2), mesh="2")
    new = AdamW(model.parameters())
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for each, optimizer in ((model, new), (reference, old)):
        optimizer.zero_grad()
        each(*points(seed=1))["loss"].backward()
        optimizer.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(distance(p, q) for p, q in pairs)


def mistakes() -> dict[str, str]:
    """What is still held of a parameter from before, and what using it says."""
    plain = net()
    pairs = tuple(plain.named_parameters())
    loss = plain(*points())["loss"]
    model = autopar.compile(plain, cluster=slow_devices(2), mesh="2")
    return {
        "a tuple": error_of(lambda: pairs[0][1].sum()),
        "its gradient": error_of(lambda: pairs[0][1].grad),
        "an earlier loss": error_of(loss.backward),
        "afterwards": error_of(lambda: model(*points())["loss"].backward()),
    }


def two() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "AdamW": far(adamw, 0),
        "AdamW, steps before": far(adamw, 2),
        "Adagrad": far(lambda model: Adagrad(model.parameters(), 1e-2), 1),
        "Adafactor": far(lambda model: Adafactor(model.parameters(), 1e-2), 1),
        "an unknown one": far(lambda model: Mine(trained(model)), 1),
        "loaded": loaded(),
        "mistakes": mistakes(),
    }


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name != "up.bias"]
