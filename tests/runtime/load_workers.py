"""What the processes of `test_load_hooks.py` do: checkpoints that modules change as they load."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import autopar
from autopar.runtime.checkpoint import lazy
from tests.grouped import grouped
from tests.runtime.workers import distance, slow_devices


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 4)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[f"{prefix}w.{name.removeprefix(f'{prefix}old.')}"] = state.pop(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


class Transposed(nn.Module):
    """Of an older version, which had its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 8))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}wt" in state:
            state[f"{prefix}w"] = state.pop(f"{prefix}wt").t().contiguous()
        super()._load_from_state_dict(state, prefix, *rest)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.t()


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(12, 8))
        self._register_load_state_dict_pre_hook(self._join)

    def _join(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}w"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.t()


class Normed(nn.Module):
    """Its checkpoint is of the time before norms counted their batches."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.l(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), Renamed()
        self.b.w = nn.Linear(8, 8, bias=False)
        self.b.w.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "renamed": (Renamed, {"old.weight": (4, 8), "old.bias": (4,)}),
    "transposed": (Transposed, {"wt": (8, 4)}),
    "joined": (Joined, {"q": (4, 8), "k": (4, 8), "v": (4, 8)}),
    "weight norm": (
        lambda: weight_norm(nn.Linear(8, 4)),
        {"bias": (4,), "weight_g": (4, 1), "weight_v": (4, 8)},
    ),
    "norm": (
        Normed,
        {"l.weight": (4, 8), "l.bias": (4,), "norm.weight": (4,), "norm.bias": (4,),
         "norm.running_mean": (4,), "norm.running_var": (4,)},
    ),
    "tied": (Tied, {"a.weight": (8, 8), "b.old.weight": (8, 8)}),
}  # fmt: skip
"""A model, and the names and shapes of what its checkpoint has."""


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def state_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = {shape: torch.rand(shape, generator=generator) for shape in shapes.values()}
    return {f"inner.{name}": values[shape].clone() for name, shape in shapes.items()}


def loads() -> dict[str, dict[str, Any]]:
    return {name: _load(*case) for name, case in CASES.items()}


def _load(make: Callable[[], nn.Module], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    options = {"cluster": slow_devices(2), "strategy": "fsdp"} if several else {}
    state, eager = state_of(shapes), Outer(make()).eval()
    eager.load_state_dict(state)
    read: list[int] = []
    plain = lazy.Stored.read

    def counted(self: lazy.Stored, place: lazy.Region) -> Tensor:
        piece = plain(self, place)
        read.append(piece.numel())
        return piece

    with torch.device("meta"):
        bare = Outer(make()).eval()
    x = torch.ones(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(state, path)
        lazy.Stored.read = counted
        try:
            model = autopar.compile(bare, weights=path, **grouped(**options))
            loss = model(x)
        finally:
            lazy.Stored.read = plain
    wanted = eager.state_dict()
    return {
        "values": max(
            distance(v.float() + 1, wanted[k].float() + 1) for k, v in model.state_dict().items()
        ),
        "loss": distance(loss, eager(x)),
        "read": sum(read) / sum(x.numel() for x in state.values()),
    }
