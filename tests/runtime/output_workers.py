"""What scripts do with the outputs of a model: the processes of `test_outputs.py`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autopar
from autopar.runtime.program.sharded import ShardedOutput, output, whole_of
from autopar.runtime.program.sharded_ops import Place
from tests.device import device, there
from tests.grouped import grouped
from tests.runtime.workers import RANK, Net, distance, points, slow_devices

SHAPE = (4, 6, 8)


def logits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(device())


def labels() -> Tensor:
    found = torch.randint(0, SHAPE[-1], SHAPE[:-1], generator=torch.Generator().manual_seed(1))
    return found.masked_fill(found > 5, -100).to(device())


def valid() -> Tensor:
    return labels().clamp(min=0)


def loss(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.reshape(-1, SHAPE[-1]), y.reshape(-1))


def filled(x: Tensor, *where: Any) -> Tensor:
    y = x * 1
    y[where] = 7.0
    return y + 0


def saved(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"logits": x}, file)
    file.seek(0)
    return torch.load(file)["logits"]


def padded(x: Tensor) -> Tensor:
    """As accelerate's `pad_across_processes` does it."""
    size = list(x.shape)
    size[1] += 2
    wider = x.new_zeros(tuple(size)) - 100
    wider[:, : x.shape[1]] = x
    return wider


METRICS: dict[str, Callable[[Tensor], Any]] = {
    "accuracy": lambda x: (x.argmax(-1) == labels()).float().mean(),
    "accuracy of some": lambda x: (x.argmax(-1) == labels())[labels() != -100].float().mean(),
    "cross entropy": lambda x: loss(x, labels()),
    "shifted": lambda x: loss(x[:, :-1], labels()[:, 1:]),
    "of each": lambda x: F.cross_entropy(x.transpose(1, 2), labels(), reduction="none").exp(),
    "log of a choice": lambda x: x.log_softmax(-1).gather(-1, valid().unsqueeze(-1)).squeeze(-1),
    "softmax": lambda x: x.softmax(-1),
    "softmax of rows": lambda x: x.softmax(0) + x.softmax(1),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "largest": lambda x: x.max(-1).values + x.amax((-1,)) + x.max(),
    "largest of rows": lambda x: x.max(0).values + x.min(0).values,
    "indices": lambda x: x.argmax() + x.argmax(0).sum() + x.argmin(1).sum(),
    "top": lambda x: x.topk(3, dim=-1)[1],
    "sums": lambda x: x.sum() + x.sum(0).mean() + x.sum((1, 2)).mean() + x.mean((0, 2)).sum(),
    "means": lambda x: x.mean(0).sum() + x.mean(1).sum() + x.mean() + x.mean(-1).sum(),
    "spread": lambda x: x.std() + x.var(0).sum() + x.norm() + x.logsumexp(-1).sum(),
    "steps": lambda x: x.cumsum(1) + x.sort(-1).values + x.flip(0),
    "float": lambda x: x.float().double() * 2 + torch.arange(8, device=device()),
    "beside": lambda x: torch.cat([x, logits()]) + torch.stack([x, x]).sum(0).repeat(2, 1, 1),
    "where": lambda x: torch.where(x > 0, x, 0.0) + x.clamp(min=0.1) + x.masked_fill(x < 0, 1),
    "mask": lambda x: x[x > 0],
    "a row": lambda x: x[1] + x[-1] + x[0, :],
    "a column": lambda x: x[..., 2] + x[:, :, 3] + x.select(2, 5),
    "last": lambda x: x[:, -1] / 2 + x[:, -1, :],
    "picked": lambda x: x[torch.tensor([2, 0])] + x[:2] + x[2:],
    "chosen": lambda x: x[torch.arange(4), torch.tensor([0, 1, 2, 3])],
    "by hand": lambda x: sum(float(row.detach().sum()) for row in x),
    "views": lambda x: x.permute(2, 0, 1).reshape(8, -1).T.unflatten(0, (4, 6)),
    "flat": lambda x: x.flatten().view(4, 6, 8) + x.reshape(24, 8).unflatten(0, (4, 6)),
    "chunks": lambda x: torch.cat([part * k for k, part in enumerate(x.chunk(2, 1))], 1),
    "matmul": lambda x: x @ x.new_ones(8, 3) + F.linear(x, logits().new_ones(3, 8)),
    "einsum": lambda x: torch.einsum("bsv,bsw->vw", x, x),
    "written": lambda x: filled(x, 0) + filled(x, x < 0) + filled(x, slice(None), 2),
    "in place": lambda x: (x * 1).add_(1).mul_(x).clamp_(max=2).masked_fill_(x < 0, 0),
    "item": lambda x: x.detach()[0, 0, 0].item() + float(x.detach().mean()),
    "list": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
    "text": lambda x: len(str(x.detach()) + repr(x.detach()[0]) + f"{x.sum():.6f}"),
    "saved": lambda x: saved(x.detach()),
    "copied": lambda x: copy.deepcopy(x.detach()),
    "padded": lambda x: padded(x.detach()),
    "equal": lambda x: torch.allclose(x, logits()) and torch.equal(x, logits()),
    "norms": lambda x: F.layer_norm(x, (8,)) + F.normalize(x, dim=-1),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), logits().flip(0).softmax(-1)),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, (logits() > 0).double()),
    "squared": lambda x: F.mse_loss(x, logits().flip(1)) + x.square().mean() + (x**2).sum(),
}  # fmt: skip


def metrics() -> list[str]:
    """Whatever differs from what one device gives: values, and gradients where there are any."""
    wrong: list[str] = []
    mesh = init_device_mesh(device().type, (2,))
    for dim in range(3):
        piece = logits().chunk(2, dim)[RANK].contiguous()
        for name, metric in METRICS.items():
            ours = output(piece.clone(), Place(mesh, (Shard(dim),)))
            assert isinstance(ours, ShardedOutput)
            ours.requires_grad_()
            theirs = logits().requires_grad_()
            found, expected = metric(ours), metric(theirs)
            found = found.full_tensor() if isinstance(found, ShardedOutput) else found
            same = isinstance(expected, Tensor) or found == pytest.approx(expected)
            if isinstance(expected, Tensor):
                same = type(found) is Tensor and torch.allclose(found, expected)
            if not same:
                wrong.append(f"{name} of S({dim}): {found} for {expected}")
            elif isinstance(expected, Tensor) and expected.requires_grad:
                weight = torch.linspace(1, 2, expected.numel()).reshape_as(expected)
                for result in (found, expected):
                    (result * weight.to(result.device)).sum().backward()
                if not torch.allclose(whole_of(ours.grad), theirs.grad):
                    wrong.append(f"gradient of {name} of S({dim})")
    return wrong


def stays_in_shards() -> list[str]:
    """Those among the common ops that put the whole together where rows are cut."""
    mesh = init_device_mesh(device().type, (2,))
    x = output(logits().chunk(2, 0)[RANK], Place(mesh, (Shard(0),)))
    made = {
        "detach": x.detach(), "float": x.float(), "argmax": x.argmax(-1), "softmax": x.softmax(-1),
        "equal": x.argmax(-1) == labels(), "shifted": x[:, :-1], "last": x[:, -1],
        "view": x.view(24, 8),
        "scaled": x / 2, "log": x.log_softmax(-1), "mean": x.mean(-1), "top": x.topk(2)[0],
        "gather": x.gather(-1, valid().unsqueeze(-1)), "clone": x.clone(),
    }  # fmt: skip
    return [name for name, value in made.items() if not isinstance(value, ShardedOutput)]


def writes() -> dict[str, Any]:
    mesh = init_device_mesh(device().type, (2,))
    x, y = output(logits().chunk(2, 0)[RANK].clone(), Place(mesh, (Shard(0),))), logits()
    for tensor in (x, y):
        tensor[:, 1].mul_(2)
        tensor.detach().transpose(0, 1)[0].add_(1)
        tensor[0].mul_(2)
        tensor[1:3][0, 2] = 5
        row = tensor[3]
        row += 1
        tensor[0] = row
        tensor[tensor > 1] = 0
        tensor.chunk(2)[0].mul_(2)
        tensor.unbind(1)[2].add_(1)
        torch.manual_seed(RANK if tensor is x else 0)
        tensor[1].normal_()
        tensor[2] = torch.rand_like(tensor)[2]
    assert isinstance(x, ShardedOutput)
    return {"seen": torch.equal(x.full_tensor(), y)}


class Changing(Net):
    """Changes a parameter in place in every forward."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.up.weight.mul_(0.9).clamp_(-0.2, 0.2)
        return super().forward(x, y)


def trained(asked: tuple[str, ...], term: Callable[[Any], Tensor]) -> dict[str, Any]:
    """Steps through the loss and another output, with dropout and metrics of the output."""
    torch.manual_seed(0)
    reference = there(Changing(0.5))
    model = autopar.compile(
        copy.deepcopy(reference),
        cluster=slow_devices(2),
        mesh="2",
        outputs={"differentiable": asked},
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
    seen: dict[str, Any] = {"metric": 0.0, "kinds": []}
    for step in range(3):
        found: list[Tensor] = []
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            torch.manual_seed(7 + step)
            out = each(*points(seed=step))
            (out["loss"] + term(out["h"])).backward()
            found.append((out["h"].argmax(-1) == points(seed=step)[1].argmax(-1)).float().mean())
            optimizer.step()
            optimizer.zero_grad()
            if each is model:
                seen["kinds"].append(type(out["h"]).__name__)
        seen["metric"] = max(seen["metric"], abs(float(found[0] - found[1])))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    seen["param"] = max(distance(p, q) for p, q in pairs)
    seen["calls"] = float(model.calls)
    seen["programs"] = len(model.plans)
    seen["in shards"] = "S(" in model.plans[0].structure.params["up.weight"].storage
    return seen


class Recurrent(nn.Module):
    """Returns a state that a script hands back at the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, state = self.recurrent(self.first(x), state)
        return self.last(x).square().mean(), state


def handed_back(stages: int, microbatches: int) -> float:
    """How far losses and gradients are from eager's where each call gets the last one's state."""
    torch.manual_seed(0)
    reference = there(Recurrent())
    options: Any = {"stages": stages, "microbatches": microbatches}
    model = autopar.compile(copy.deepcopy(reference), cluster=slow_devices(2), **grouped(**options))
    ours = theirs = None
    furthest = 0.0
    for seed in range(3):
        x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(seed)).to(device())
        loss, ours = model(x, ours)
        expected, theirs = reference(x, theirs)
        (loss * 2).backward()
        (expected * 2).backward()
        ours, theirs = ours.detach(), theirs.detach()
        furthest = max(furthest, float((loss - expected).abs()), distance(ours, theirs))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    grads = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
    return max(furthest, *(distance(ours, theirs) for ours, theirs in grads))


def two() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = output(logits(), Place(init_device_mesh(device().type, (2,)), (Replicate(),)))
    found = {
        "wrong": metrics(),
        "gathered": stays_in_shards(),
        "writes": writes(),
        "whole": type(whole) is Tensor,
        "shown": trained((), lambda h: h.square().mean()),
        "asked for": trained(("h",), lambda h: h[:, 1].exp().sum()),
        "not used": trained((), lambda h: torch.zeros(())),
        "handed back": [handed_back(1, 1), handed_back(1, 2), handed_back(2, 1)],
    }
    dist.destroy_process_group()
    return found
