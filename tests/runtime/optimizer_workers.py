"""Every optimizer of torch, on shards and on whole tensors: what the processes of
`test_optimizers.py` do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

import autopar
from autopar.errors import AutoparError
from autopar.runtime.module.changes import know_changes
from autopar.runtime.module.optimizers import mark
from autopar.runtime.torch_private import tree_flatten
from tests.cost_model.optimizer_variants import VARIANTS

Spec = tuple[tuple[int, ...], tuple[Placement, ...]]
MATRICES: tuple[Spec, ...] = (
    ((8, 6), (Shard(0), Replicate())),
    ((6, 8), (Shard(0), Shard(1))),
    ((8, 6), (Shard(0), Shard(0))),
    ((5, 3), (Shard(0), Replicate())),
)
VECTORS: tuple[Spec, ...] = (
    ((7,), (Replicate(), Replicate())),
    ((5,), (Shard(0), Shard(0))),
)


def kinds() -> list[type[Optimizer]]:
    found = (x for x in vars(optim).values() if inspect.isclass(x) and issubclass(x, Optimizer))
    return sorted({x for x in found if x is not Optimizer}, key=lambda x: x.__name__)


def variants(kind: type[Optimizer]) -> Iterator[dict[str, Any]]:
    names = inspect.signature(kind).parameters
    base: dict[str, Any] = {"momentum": 0.9} if kind is optim.SGD else {}
    if kind is optim.LBFGS:
        base = {"max_iter": 3, "line_search_fn": "strong_wolfe"}
    yield base
    for name in ("foreach", "fused"):
        if name in names and kind is not optim.Adafactor:
            yield base | {name: True}


def _clip(optimizer: Optimizer, *_: Any) -> None:
    """To a norm that all gradients together have, and by their own largest element."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([torch.linalg.vector_norm(grad) for grad in grads]).norm()
    for grad in grads:
        grad.mul_(0.3 / norm)
        grad.div_(1 + grad.abs().max())


def _unit_columns(optimizer: Optimizer, *_: Any) -> None:
    for param in (p for group in optimizer.param_groups for p in group["params"] if p.dim() > 1):
        param.div_(param.norm(dim=0, keepdim=True) + 0.5)
        param.sub_(param.mean(dim=1, keepdim=True) * 0.1)


def distances(kind: type[Optimizer], options: dict[str, Any], hooked: bool = False) -> float:
    """Three steps on shards and on whole tensors, with hooks that a script has registered if they
    are `hooked`: how far they end apart."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    specs = MATRICES if kind is optim.Muon else MATRICES + VECTORS
    whole = [torch.randn(shape) for shape, _ in specs]
    ours = [
        nn.Parameter(distribute_tensor(w.clone(), mesh, places))
        for w, (_, places) in zip(whole, specs, strict=True)
    ]
    theirs = [nn.Parameter(w.clone()) for w in whole]
    for param in ours:
        mark(param)
    make: Any = kind
    steps: list[Optimizer] = [make(params, **options) for params in (ours, theirs)]
    if hooked:
        know_changes([mesh])
        for optimizer in steps:
            optimizer.register_step_pre_hook(torch.no_grad()(_clip))
            optimizer.register_step_post_hook(torch.no_grad()(_unit_columns))
    for k in range(3):
        for optimizer, params in zip(steps, (ours, theirs), strict=True):
            loss = _closure(optimizer, params, k)
            if hooked:
                loss()  # so that there are gradients when hooks look at them
            optimizer.step(loss if not hooked or kind is optim.LBFGS else None)
    for param in ours:
        for value in steps[0].state.get(param, {}).values():
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim():
                assert isinstance(value, DTensor) and value.placements == param.placements
    return max(
        float((p.full_tensor() - q).abs().max() / q.abs().max())
        for p, q in zip(ours, theirs, strict=True)
    )


def _closure(optimizer: Optimizer, params: list[nn.Parameter], k: int) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, param in enumerate(params):
            value = param.full_tensor() if isinstance(param, DTensor) else param
            slope = 1 + torch.arange(value.numel()).reshape(value.shape)
            total = total + (slope * (value - 0.1 * (i + k)) ** 2).mean()
        total.backward()
        return total

    return loss


def every_optimizer() -> dict[str, Any]:
    """In its default way, and those that are common in every way that they have."""
    return _seen(lambda kind, way: way == 0 or kind in (optim.SGD, optim.AdamW))


HELD = (
    "adamw-amsgrad", "rmsprop-momentum-centered", "asgd", "muon", "adafactor",
    "transformers-adafactor-momentum", "lbfgs-3",
)  # fmt: skip
"""The optimizers whose states differ in kind."""


class Mixed(nn.Module):
    """A matrix, an uneven one, vectors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven = nn.Linear(16, 64), nn.Linear(64, 33)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.uneven(self.even(x))).square().mean()


def kept_bytes() -> dict[str, list[int]]:
    """Per optimizer what the plan says of its states, and what a rank holds after a step."""
    torch.set_num_threads(1)
    seen: dict[str, list[int]] = {}
    for name, kind, settings in VARIANTS:
        if name not in HELD:
            continue
        torch.manual_seed(0)
        net = Mixed()
        params = [p for p in net.parameters() if kind is not optim.Muon or p.dim() == 2]
        make: Any = kind
        optimizer = make(params, **settings)
        model = autopar.compile(net, constraints={"strategy": "fsdp"}, optimizer=optimizer)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 128).reshape(8, 16))
            loss.backward()
            return loss

        optimizer.step(closure)
        (plan,) = model.plans
        values = (s for state in optimizer.state.values() for s in tree_flatten(state)[0])
        local = (s.to_local() if isinstance(s, DTensor) else s for s in values)
        is_kept = [
            s.numel() * s.itemsize
            for s in local
            if isinstance(s, Tensor) and (s.dim() or kind is not optim.LBFGS)
        ]
        seen[name] = [plan.estimates.memory.optimizer, sum(is_kept)]
    torch.distributed.destroy_process_group()
    return seen


def every_way() -> dict[str, Any]:
    return _seen(lambda *_: True)


def _seen(is_tried: Callable[[type[Optimizer], int], bool]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    seen: dict[str, Any] = {}
    for kind in kinds():
        for way, options in enumerate(variants(kind)):
            if not is_tried(kind, way):
                continue
            name = f"{kind.__name__} {' '.join(options)}".strip()
            try:
                seen[name] = distances(kind, options)
                if way == 0:
                    seen[f"{name} with hooks"] = distances(kind, options, hooked=True)
            except AutoparError as error:
                seen[name] = str(error)
    torch.distributed.destroy_process_group()
    return seen
