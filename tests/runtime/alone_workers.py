"""What one rank does alone, as scripts do: the processes of `test_alone.py`."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import time
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.process import alone
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
    model: Any = autopar.compile(Model(), constraints={"strategy": os.environ["STRATEGY"]})
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


def refused() -> dict[str, str]:
    """What is said of what cannot be done by rank 0 alone."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    weight = model.first.weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    is_alone = dist.get_rank() == 0
    said: dict[str, str] = {}

    def step() -> None:
        model(torch.ones(6, 8))[0].backward()
        optimizer.step()

    def tried(name: str, work: Any) -> None:
        try:
            with torch.no_grad():
                work()
        except AutoparError as error:
            said[name] = f"{type(error).__name__}: {error}"

    def assigned() -> None:
        weight.data = torch.zeros(6, 8)

    def part() -> None:
        weight[0] = 0

    step()
    before = weight.detach().clone()
    step()
    if is_alone:
        tried("of before", before.norm)
        tried("gradient after the step", weight.grad.norm)
        tried("drawn", lambda: nn.init.normal_(weight))
        tried("drawn like it", lambda: torch.randn_like(weight))
        tried("part", part)
        tried("masked", lambda: weight.masked_fill_(torch.ones(6, 8).bool(), 1))
        tried("data", assigned)
        with torch.enable_grad():
            loss = weight.square().sum()
        tried("backward", lambda: loss.backward())
        tried("collective", lambda: dist.all_reduce(weight.detach()))
    step()
    said["goes on"] = str(float(weight.detach().full_tensor().sum()))
    if is_alone:
        tried("step", optimizer.step)
    else:
        tried("step", step)
    if is_alone:
        with torch.no_grad():
            weight.mul_(2)
    tried("in place", step)
    return said


def trusted() -> str:
    """A place where all ranks have read, and where rank 0 then does alone."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))
    try:
        for k in range(5):
            if dist.get_rank() == 0 or k < 4:
                model.first.weight.detach().norm()
        model(torch.ones(6, 8))
    except (AutoparError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def at_the_end() -> list[float]:
    """What rank 0 reads when the others have ended their scripts."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))
    if dist.get_rank():
        return []
    time.sleep(2)
    return [float(model.first.weight.norm()), float(model.second.bias.sum())]


def copied() -> list[float]:
    """What rank 0 reads of copies that the others have released: at once, after a call of theirs,
    and, of one that all had at a step, at the end. And how many are held once ranks have met."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[float] = []
    kept: list[ReferenceType[nn.Module]] = []

    def snapshot(runs: bool) -> None:
        copied = copy.deepcopy(model)
        kept.extend((ref(copied), ref(copied._model), ref(copied.first.weight)))
        if runs:
            copied(torch.ones(6, 8))
        if dist.get_rank() == 0:
            time.sleep(1)
            seen.extend([float(copied.first.weight.norm()), float(copied.second.bias.sum())])

    def average() -> None:
        copied = copy.deepcopy(model)
        kept.extend((ref(copied), ref(copied._model)))
        copied(torch.ones(6, 8))
        for runs in (False, True, True):
            model(torch.ones(6, 8))[0].backward()
            snapshot(runs)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            time.sleep(1)
            seen.append(float(copied.first.weight.norm()))

    average()
    model(torch.ones(6, 8))
    gc.collect()  # Guards of the last call form a cycle.
    return [*seen, sum(known() is not None for known in kept)]


def meets() -> list[int]:
    """How often each rank has read together with the others, and alone: rank 0 alone while the
    others wait in a collective, and then all together, each time at other lines."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))
    if dist.get_rank() == 0:
        model.first.weight.norm()
    dist.barrier()
    model.second.weight.norm()
    if dist.get_rank() == 0:
        model.first.bias.norm()
    dist.all_reduce(torch.ones(1))
    model.second.bias.norm()
    here = alone._here[-1]
    return [here.joint.total(), len(here.alone)]


def without_groups() -> list[float]:
    """What ranks read when the script has ended the process groups."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))
    dist.destroy_process_group()
    return [float(model.first.weight.norm()), float(model.second.bias.sum())]


def shares() -> dict[str, float]:
    """Each rank logs a share of the parameters, from one line."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    wanted = dict(Model().named_parameters())
    model(torch.ones(6, 8))
    off: dict[str, float] = {}
    for k, (name, param) in enumerate(model.named_parameters()):
        if k % dist.get_world_size() == dist.get_rank():
            off[name] = float((whole(param.square()) - wanted[name].square()).detach().abs().max())
    return off


def added() -> list[float]:
    """A gradient to which the script adds between two reads of rank 0."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))[0].backward()
    seen: list[float] = []
    for _ in range(2):
        if dist.get_rank() == 0:
            seen.append(float(model.first.weight.grad.norm()))
        dist.barrier()
        model.first.weight.square().sum().backward()
    if dist.get_rank() == 0:
        seen.append(float(model.first.weight.grad.norm()))
    dist.barrier()
    plain = Model()
    plain(torch.ones(6, 8))[0].backward()
    for k, norm in enumerate(seen):
        assert plain.first.weight.grad is not None
        seen[k] = abs(norm - float(plain.first.weight.grad.norm()))
        plain.first.weight.square().sum().backward()
    return seen


def ahead() -> str:
    """A gradient to which rank 1 has added already, by a backward that sends nothing."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))[0].backward()
    weight, told = model.first.weight, ""
    if dist.get_rank() == 1:
        weight.square().backward(torch.ones_like(weight))
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            told = str(float(weight.grad.norm()))
        except AutoparError as error:
            told = str(error)
    dist.barrier()
    return told


def threads() -> float:
    """A thread of a logger reads while the script trains."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))
    wanted = float(Model().first.weight.norm())
    read: list[float] = []
    thread = threading.Thread(target=lambda: read.append(float(model.first.weight.norm())))
    thread.start()
    for _ in range(3):
        model(torch.ones(6, 8))
    thread.join()
    return abs(read[0] - wanted)


def evaluated() -> str:
    """The model is called by rank 0 alone, while the others wait for it."""
    model: Any = autopar.compile(Model(), constraints={"strategy": "fsdp"})
    model(torch.ones(6, 8))
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(6, 8))
        dist.barrier()
    except (AutoparError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
