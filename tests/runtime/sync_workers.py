"""Collectives of a script on outputs, parameters and gradients: the processes of `test_sync.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.runtime.workers import whole


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.line(x)
        return found.square().mean(), found


def synced() -> dict[str, float]:
    """How far what comes of a collective is from that of whole tensors on every rank."""
    torch.manual_seed(3)
    x = torch.randn(6, 8)
    eager = Model()
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    size, rank = dist.get_world_size(), dist.get_rank()
    for net in (eager, model):
        net(x)[0].backward()
    output = model(x)[1].detach()
    assert not isinstance(output, nn.Parameter) and type(output) is not Tensor
    pairs = {
        "output": (output, eager(x)[1].detach()),
        "parameter": (model.line.weight.detach(), eager.line.weight.detach()),
        "gradient": (model.line.bias.grad, eager.line.bias.grad),
    }
    seen: dict[str, float] = {}
    for name, (ours, theirs) in pairs.items():
        for way, found in _ways(ours, size).items():
            wanted = _ways(theirs, size)[way]
            seen[f"{name}, {way}"] = float((whole(found) - wanted).abs().max())
    metric = output.softmax(-1).sum(0)
    dist.all_reduce(metric)
    wanted = size * eager(x)[1].softmax(-1).sum(0)
    seen["sum of a metric"] = float((whole(metric) - wanted).detach().abs().max())
    entire = output.full_tensor()
    parts = [entire * (k + 1) for k in range(size)] if rank == 0 else None
    mine = torch.zeros_like(output)
    dist.scatter(mine, parts)
    seen["scatter"] = float((whole(mine) - (rank + 1) * pairs["output"][1]).abs().max())
    gradient = model.line.weight.grad
    alone, unequal = "x.full_tensor() on all ranks before", "x.full_tensor(), to write to"
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "scatter by one rank": (lambda: dist.scatter(mine, [output] * size), alone),
        "send": (lambda: dist.send(output, (rank + 1) % size), alone),
        "receive": (lambda: dist.recv(gradient, (rank + 1) % size), alone),
        "some ranks": (lambda: dist.all_reduce(output, group=first), alone),
        "a gradient of some ranks": (lambda: dist.all_reduce(gradient, group=first), alone),
        "reduce": (lambda: dist.reduce(gradient, 0), unequal),
    }
    first = dist.new_group([0])
    for name, (call, words) in calls.items():
        # Where it is refused on rank 0, the others have nothing to wait for.
        seen[f"{name} is not told"] = float(rank == 0 and not _is_told(call, words))
    return seen


def _is_told(call: Callable[[], Any], words: str) -> bool:
    try:
        call()
    except AutoparError as error:
        return words in str(error)
    return False


def _ways(x: Tensor, size: int) -> dict[str, Tensor]:
    into = [torch.zeros_like(x) for _ in range(size)]
    dist.all_gather(into, x)
    plain = [torch.zeros(x.shape) for _ in range(size)]
    dist.all_gather(plain, x)
    total, largest, sent, last = (x.clone() for _ in range(4))
    dist.all_reduce(total)
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(sent, src=size - 1)
    dist.all_reduce(last[-1])
    row = torch.zeros(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(row, x)
    return {
        "all_gather": torch.stack([whole(each) for each in into]), "into plain": torch.stack(plain),
        "all_reduce": total, "all_reduce, then an op": total.square().sum(), "maximum": largest,
        "broadcast": sent, "all_reduce of a part": last, "all_gather_into_tensor": row,
    }  # fmt: skip
