"""What one rank does alone, as scripts do: the processes of `test_alone.py`."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from tests.runtime.workers import whole


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.second(self.first(x).tanh())
        return found.square().mean(), found


def logged(model: Any, optimizer: Any, out: Tensor) -> dict[str, Tensor]:
    """What scripts print, log and save of a training step, before the optimizer's."""
    weight, bias = model.first.weight, model.second.bias
    seen = {
        "norm": weight.norm(),
        "detached": weight.detach().float().abs().mean(),
        "data": weight.data.std(),
        "empty pieces": bias.sum(),
        "row": weight[3],
        "product": weight @ weight.t(),
        "text": torch.tensor([float(x) for x in f"{weight.sum():.3f} {bias.max():.3f}".split()]),
        "list": torch.tensor(weight.tolist()),
        "numpy": torch.from_numpy(weight.detach().cpu().numpy()),
        "histogram": torch.histc(weight.detach(), 4),
        "gradient": weight.grad.abs().max(),
        "gradient's norm": torch.stack([p.grad.norm() for p in model.parameters()]).norm(),
        "whole gradient": weight.grad.clone(),
        "output": out.argmax(-1),
        "row of the output": out[1].softmax(-1),
        "finite": (~torch.isfinite(weight)).any().float(),
    }
    for k, param in enumerate(model.parameters()):
        for key, value in optimizer.state.get(param, {}).items():
            seen[f"state {k} {key}"] = value.sum()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "some": [weight.detach() * 2]}, file)
    file.seek(0)
    saved = torch.load(file)
    seen |= {f"saved {name}": value for name, value in saved["model"].items()}
    return whole_of(seen | {"saved in a list": saved["some"][0]})


def whole_of(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of each, which later steps change."""
    return {name: whole(x).detach().double().clone() for name, x in seen.items()}


def trained(model: Any, rank: int, alone: int | None) -> list[dict[str, Tensor]]:
    """What rank `alone` has logged of each step; None stands for all."""
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    seen: list[dict[str, Tensor]] = []
    for step in range(4):
        x = torch.randn(6, 8)
        optimizer.zero_grad()
        loss, out = model(x)
        if alone in (None, rank):
            seen.append(whole_of({"early": out.mean(), "loss": loss}))
        loss.backward()
        if alone in (None, rank):
            seen.append(logged(model, optimizer, out))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if alone in (None, rank):
            late = [p.abs().sum() for p in model.parameters()]
            seen.append(whole_of({"after": torch.stack(late), "clipped": norm}))
        if step == 2:
            if alone in (None, rank):
                seen.append(whole_of({"in a barrier": model.first.weight.norm()}))
            dist.barrier()
    return seen


def logs() -> dict[str, float]:
    """How far what one rank logs is from what one process does."""
    model: Any = autopar.compile(Model(), strategy=os.environ["STRATEGY"])
    rank, alone = dist.get_rank(), int(os.environ["ALONE"])
    found = trained(model, rank, alone)
    wanted = trained(Model(), rank, None)
    if rank != alone:
        return {}
    off: dict[str, float] = {}
    for k, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.shape == theirs[name].shape, name
            off[f"{k} {name}"] = float((value - theirs[name]).abs().max())
    return off
