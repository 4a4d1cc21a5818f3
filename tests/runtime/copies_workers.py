"""What the processes of `test_copies.py` do: whole parameters, copies, averages, generation."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import autopar
from autopar.errors import AutoparError
from tests.grouped import grouped
from tests.runtime.workers import (
    RANK,
    Net,
    distance,
    error_of,
    gpt2,
    net,
    points,
    slow_devices,
    whole,
)

PINS = {"up.weight": "S(0) on dp", "down.weight": "S(1) on dp"}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def updated_norms() -> dict[str, float]:
    """How far the statistics and parameters of averages, and of what is averaged, are from those of
    eager, where the statistics are made anew for the average."""
    loader = [torch.randn(8, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    size = dist.get_world_size() if dist.is_initialized() else 1
    options = {"cluster": slow_devices(2), "strategy": "fsdp"} if size > 1 else {}
    found: dict[str, float] = {}
    for name, how in AVERAGES.items():
        seen: list[list[Tensor]] = []
        for model in (autopar.compile(Normed(), **grouped(**options)), Normed()):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            averaged = AveragedModel(model, **how)
            for x in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged.update_parameters(model)
            update_bn(loader, averaged)
            update_bn(loader[:2], averaged)
            averaged(loader[2])
            y = averaged.eval()(loader[0])
            seen.append([*map(whole, averaged.state_dict().values()), y])
        found[name] = max(float((a - b).detach().abs().max()) for a, b in zip(*seen, strict=True))
    return found


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of buffers too": {"use_buffers": True},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema of buffers too, one by one": {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
}


def both() -> tuple[Net, Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A model, and a compiled one that stores weights in shards, with an optimizer each."""
    reference = net()
    size = dist.get_world_size() if dist.is_initialized() else 1
    options = {"cluster": slow_devices(2), "mesh": 2, "pins": PINS} if size > 1 else {}
    model = autopar.compile(copy.deepcopy(reference), **grouped(**options))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference))
    return reference, model, ours, theirs


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    loss = model(*points(seed=seed))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach()
        for name, x in model.state_dict().items()
    }


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def unsharded() -> dict[str, Any]:
    reference, model, ours, theirs = both()
    seen: dict[str, Any] = {}
    with model.unsharded() as whole:
        seen["before the first call"] = distance(
            whole(*points())["loss"], reference(*points())["loss"]
        )
    step(model, ours, 0)
    step(reference, theirs, 0)
    before = [(id(p), type(p), p.to_local().shape) for p in model.parameters()]
    seen["sharded"] = any(list(p.to_local().shape) != list(p.shape) for p in model.parameters())
    # Some change weights by .data, which leaves no trace; forward in training changes a buffer.
    with model.unsharded():
        seen["plain"] = all(type(x) is Tensor for x in model.state_dict().values())
        seen["state"] = furthest(model.state_dict(), reference.state_dict())
        seen["forward"] = distance(model(*points())["h"], reference(*points())["h"])
        model.up.weight.data.clamp_(max=0.1)
        reference.up.weight.data.clamp_(max=0.1)
    with model.unsharded(rank=0) as whole:
        seen["given"] = whole is not None
        if whole is not None:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            seen["saved"] = furthest(torch.load(io.BytesIO(file.getvalue())), state(reference))
            with torch.no_grad():
                model(*points())
                model.down.weight.mul_(2.0)
        else:
            seen["elsewhere"] = error_of(lambda: model(*points()))
    with torch.no_grad():
        reference(*points())
        reference.down.weight.mul_(2.0)
    with model.unsharded(writeback=False):
        model.up.weight.data.zero_()
        model(*points())
    seen["as before"] = before == [(id(p), type(p), p.to_local().shape) for p in model.parameters()]
    step(model, ours, 1)
    step(reference, theirs, 1)
    seen["kept"] = furthest(state(model), state(reference))

    def train() -> None:
        with model.unsharded():
            model(*points())["loss"].backward()

    def fail() -> None:
        with model.unsharded():
            model.up.weight.data.zero_()
            if RANK == 1:
                raise AutoparError("no")

    def replace() -> None:
        with model.unsharded():
            model.up.weight = nn.Parameter(torch.zeros(1))

    def nest() -> None:
        with model.unsharded(), model.unsharded():
            pass

    for call in (train, fail, replace, nest):
        seen[call.__name__] = error_of(call)
    seen["no rank"] = error_of(lambda: model.unsharded(rank=7).__enter__())
    expected = state(reference)
    seen["undone"] = max(
        float((value - expected[name]).abs().max())
        for name, value in state(model).items()
        if name != "calls"
    )
    return seen


def averaged() -> dict[str, Any]:
    """Averages by torch and by hand, of copies made before and after the first call."""
    reference, model, ours, theirs = both()
    average = get_ema_multi_avg_fn(0.9)
    mine = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    plain = AveragedModel(reference, multi_avg_fn=average, use_buffers=True)
    mean, plain_mean = AveragedModel(model), AveragedModel(reference)
    for seed in range(3):
        step(model, ours, seed)
        step(reference, theirs, seed)
        for kept, other in ((mine, model), (plain, reference), (mean, model)):
            kept.update_parameters(other)
        plain_mean.update_parameters(reference)
    seen: dict[str, Any] = {}
    seen["parameters"] = furthest(state(mine), state(plain))
    seen["mean"] = furthest(state(mean), state(plain_mean))
    with torch.no_grad():
        seen["call"] = distance(mine(*points())["loss"], plain(*points())["loss"])
    later, plain_later = copy.deepcopy(model), copy.deepcopy(reference)
    seen["kind"] = type(later).__name__
    seen["plans"] = [len(later.plans), len(model.plans)]
    seen["own"] = not {*map(id, later.parameters())} & {*map(id, model.parameters())}
    ours = torch.optim.SGD(later.parameters(), lr=0.1)
    step(later, ours, 3)
    step(plain_later, torch.optim.SGD(plain_later.parameters(), lr=0.1), 3)
    seen["copy"] = furthest(state(later), state(plain_later))
    seen["original"] = furthest(state(model), state(reference))
    return seen


def pickled() -> dict[str, Any]:
    reference, model, ours, theirs = both()
    step(model, ours, 0)
    step(reference, theirs, 0)
    outside = pickle.loads(pickle.dumps(model))
    with model.unsharded():
        inside = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    if RANK == 1:
        torch.save(model, file)
    dist.barrier()
    alone = torch.load(io.BytesIO(file.getvalue()), weights_only=False) if RANK == 1 else inside
    return {
        how: [type(each).__name__, furthest(state(each), state(reference))]
        for how, each in (("outside", outside), ("inside", inside), ("alone", alone))
    }


def generated() -> dict[str, Any]:
    """Tokens of two prompts, by search and by chance."""
    reference: Any = gpt2().eval()
    reference.config.use_cache = True
    torch.manual_seed(RANK)
    model = autopar.compile(copy.deepcopy(reference))
    ids = torch.arange(8).reshape(2, 4)
    model(input_ids=ids, labels=ids)
    told: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0}
    seen: dict[str, Any] = {}
    for name, options in (("greedy", {}), ("sampled", {"do_sample": True})):
        torch.manual_seed(3 + RANK)
        seen[name] = model.generate(ids, **told, **options).tolist()
        seen[f"{name}, next number"] = float(torch.rand(()))
        torch.manual_seed(3)
        seen[f"{name} by eager"] = reference.generate(ids, **told, **options).tolist()
        seen[f"{name}, next by eager"] = float(torch.rand(()))
    seen["other prompts"] = error_of(lambda: model.generate(ids + RANK, **told))
    with model.unsharded(rank=0) as whole:
        if whole is not None:
            seen["alone"] = model.generate(ids, **told).tolist()
    return seen


def two() -> dict[str, Any]:
    """Everything that two processes are needed for, in one start."""
    torch.set_num_threads(1)
    autopar.compile(nn.Linear(2, 2))
    return {
        "unsharded": unsharded(),
        "averaged": averaged(),
        "norms": updated_norms(),
        "pickled": pickled(),
        "generated": generated(),
    }
