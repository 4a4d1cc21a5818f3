"""What the processes of `test_collectives` do: models whose forward talks to other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError


class Blocks(nn.Module):
    """Blocks that are alike, each of which calls `talk` on a sum over its rows."""

    def __init__(self, talk: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.talk = talk

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x).tanh()
            x = y + self.talk(y.sum(0).detach())
        return x.square().mean()


def in_place(total: Tensor) -> Tensor:
    dist.all_reduce(total)
    return total


def out_of_place(total: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    found = torch.ops._c10d_functional.all_reduce(total, "sum", group.group_name)
    return torch.ops._c10d_functional.wait_tensor(found)


def differentiable(total: Tensor) -> Tensor:
    return torch.distributed.nn.all_reduce(total)


def gathered(total: Tensor) -> Tensor:
    parts = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, total)
    return torch.stack(parts).sum(0)


def sent(total: Tensor) -> Tensor:
    dist.broadcast(total, 0)
    return total


def of_objects(total: Tensor) -> Tensor:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, total.shape)
    return total


def met(total: Tensor) -> Tensor:
    dist.barrier()
    return total


def only_without_autopar(total: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        dist.all_reduce(total)
    return total


TALKS = (in_place, out_of_place, differentiable, gathered, sent, of_objects, met)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(6, 6), nn.SyncBatchNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.line(x)).exp().mean()


def _rows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def _differs(model: nn.Module, eager: nn.Module, rows: Tensor) -> float:
    """By how much losses, gradients and buffers differ from those of the whole batch."""
    expected = eager(_rows())
    expected.backward()
    loss = model(rows)
    loss.backward()
    pairs = [(loss.detach(), expected.detach())]
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        grad: Any = mine.grad
        pairs.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad, other.grad))
    pairs += list(zip(model.buffers(), eager.buffers(), strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)


def talk() -> dict[str, Any]:
    dist.init_process_group("gloo")
    told: dict[str, str] = {}
    for each in TALKS:
        torch.manual_seed(0)
        try:
            autopar.compile(Blocks(each).double())(_rows())
        except TraceError as error:
            told[each.__name__] = str(error)
    torch.manual_seed(0)
    plain = Blocks(lambda total: total).double()
    guarded = Blocks(only_without_autopar).double()
    guarded.load_state_dict(plain.state_dict())
    normed = Normed().double()
    eager = copy.deepcopy(normed)
    eager.norm.forward = nn.BatchNorm1d.forward.__get__(eager.norm)
    half = _rows().chunk(2)[dist.get_rank()]
    return {
        "told": told,
        "guarded": _differs(autopar.compile(guarded, strategy="fsdp"), plain, _rows()),
        "normed": _differs(autopar.compile(normed, inputs="local", strategy="ddp"), eager, half),
    }
