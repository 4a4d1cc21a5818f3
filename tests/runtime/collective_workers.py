"""What the processes of `test_collectives` do: models whose forward talks to other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed import all_reduce as reduce_all
from torch.distributed import get_world_size as world_size

import autopar
from autopar.errors import TraceError
from autopar.tracer.torch_private import functional_collectives as collectives


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


def averaged(total: Tensor) -> Tensor:
    handle = dist.all_reduce(total, op=dist.ReduceOp.AVG, async_op=True)
    assert handle is not None
    handle.wait()
    dist.all_reduce(total)
    return total / dist.get_world_size() + dist.get_rank()


def imported(total: Tensor) -> Tensor:
    reduce_all(total, group=dist.group.WORLD)
    return total / world_size()


def joined(total: Tensor) -> Tensor:
    found = total.new_zeros(total.shape)
    dist.all_gather_into_tensor(found, total)
    dist.reduce_scatter_tensor(total, found)
    return total


def functional(total: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    found = collectives.all_reduce(total, "sum", group)
    return collectives.all_gather_tensor(found, 0, group)


def stacked(total: Tensor) -> Tensor:
    return torch.stack(torch.distributed.nn.all_gather(total)).sum(0)


def of_some(total: Tensor) -> Tensor:
    dist.all_reduce(total, group=_FIRST[0])
    return total


def from_another(total: Tensor) -> Tensor:
    dist.broadcast(total, 1)
    return total


def to_another(total: Tensor) -> Tensor:
    dist.send(total, 1)
    return total


_FIRST: list[Any] = []
"""The group of rank 0."""


def only_without_autopar(total: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        dist.all_reduce(total)
    return total


REFUSED = (out_of_place, of_some, from_another, to_another)
TAKEN = (
    in_place, differentiable, gathered, sent, of_objects, met, averaged, imported, joined,
    functional, stacked,
)  # fmt: skip


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
    _FIRST.append(dist.new_group([0]))
    for each in REFUSED:
        torch.manual_seed(0)
        try:
            autopar.compile(Blocks(each).double())(_rows())
        except TraceError as error:
            told[each.__name__] = str(error)
    torch.manual_seed(0)
    plain = Blocks(lambda total: total).double()
    taken: dict[str, float] = {}
    for each in TAKEN:
        model = Blocks(each).double()
        model.load_state_dict(plain.state_dict())
        plain.zero_grad()
        taken[each.__name__] = _differs(
            autopar.compile(model, constraints={"strategy": "fsdp"}), plain, _rows()
        )
    plain.zero_grad()
    guarded = Blocks(only_without_autopar).double()
    guarded.load_state_dict(plain.state_dict())
    normed = Normed().double()
    eager = copy.deepcopy(normed)
    eager.norm.forward = nn.BatchNorm1d.forward.__get__(eager.norm)
    half = _rows().chunk(2)[dist.get_rank()]
    return {
        "told": told,
        "taken": taken,
        "guarded": _differs(
            autopar.compile(guarded, constraints={"strategy": "fsdp"}), plain, _rows()
        ),
        "normed": _differs(
            autopar.compile(normed, inputs="local", constraints={"strategy": "ddp"}), eager, half
        ),
    }
