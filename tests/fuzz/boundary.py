"""Scripts drawn by number: what they do beside the calls of a model, on all ranks and on one."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import autopar

WIDTH, ROWS, STEPS = 8, 8, 4
TOLERANCE = 1e-8
"""In float64."""


AROUND: dict[str, Tensor] = {}
"""What a model finds around it."""
CALLED = {"calls": 0}


class Net(nn.Module):
    """Layers by chance, one of which may be picked by a counter, with a loss inside or none, and a
    scale that is no parameter, which the script trains or makes."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.picked = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drop = nn.Dropout(draw.choice((0.0, 0.2)))
        self.norm = draw.choice((nn.Identity, nn.LayerNorm, nn.BatchNorm1d))(16)
        self.counts, self.keeps = draw.random() < 0.3, draw.random() < 0.3
        self.has_loss = draw.random() < 0.5
        self.calls, self.kept = 0, torch.zeros(())
        self.register_buffer("seen", torch.zeros(16))
        self.where = draw.choice(("", "", "attribute", "buffer", "list", "global", "made"))
        scale = (torch.rand(16) + 0.5).requires_grad_(self.where != "made")
        self.listed: list[Tensor] = [scale] if self.where == "list" else []
        self.scale: Tensor
        if self.where == "buffer":
            self.register_buffer("scale", scale)
        else:
            self.scale = scale if self.where in ("attribute", "made") else torch.ones(16)
        AROUND["scale"], CALLED["calls"] = scale, 0

    def outside(self) -> list[Tensor]:
        """What the script trains beside parameters."""
        known = {"list": self.listed, "global": [AROUND["scale"]]}
        return known.get(self.where, [self.scale] if self.scale.requires_grad else [])

    def scaled(self, x: Tensor) -> Tensor:
        if self.where == "global":
            return x * AROUND["scale"]
        return x * (self.listed[0] if self.where == "list" else self.scale)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.first(x)).tanh()
        if self.counts:
            x = self.picked[self.calls % 2](x)
            self.calls += 1
        CALLED["calls"] += 1
        x = self.scaled(x) if self.where else x
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        if self.keeps:
            self.kept = x.abs().mean()
        made = self.last(self.drop(x))
        return (made.square().mean(), made) if self.has_loss else made


@dataclass
class Script:
    """What a script has by now, and what it has seen."""

    draw: random.Random
    model: Any
    optimizer: torch.optim.Optimizer
    average: nn.Module
    head: nn.Linear
    folder: Path
    seen: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])
    """By rank 0."""
    saves: int = 0
    hyper: nn.Linear = field(default_factory=lambda: nn.Linear(3, 16))

    def param(self) -> Tensor:
        return self.draw.choice([*self.model.parameters()])

    def path(self, own: str = "") -> Path:
        self.saves += 1
        return self.folder / f"{self.saves}{own}.pt"


def numbers(state: Any) -> list[float]:
    """All that is in what was saved, by its keys."""
    if isinstance(state, Tensor):
        return state.detach().double().flatten().tolist()
    if isinstance(state, dict):
        return [x for key in sorted(state, key=str) for x in numbers(state[key])]
    if isinstance(state, (list, tuple)):
        return [x for value in state for x in numbers(value)]
    return [float(state)] if isinstance(state, int | float) else []


def _is_first() -> bool:
    return dist.get_rank() == 0


def seeds(s: Script) -> None:
    torch.manual_seed(s.draw.randrange(100))


def draws(s: Script) -> None:
    s.seen += torch.randn(s.draw.randrange(1, 20)).tolist()


def draws_on_rank_0(s: Script) -> None:
    count = s.draw.randrange(1, 20)
    if _is_first():
        with torch.random.fork_rng():  # Else the next batch of the others would be another.
            torch.manual_seed(count)
            torch.randn(count)


def logs(s: Script) -> None:
    x = s.param()
    s.seen += [x.norm().item(), float(x.abs().max()), x.sum().item()]


def logs_on_rank_0(s: Script) -> None:
    x = s.param()
    if _is_first():
        s.alone += [x.norm().item(), float(f"{x.mean():.12f}"), *x.flatten()[:3].tolist()]


def saves_on_all(s: Script) -> None:
    path = s.path()
    torch.save({"model": s.model.state_dict(), "states": s.optimizer.state_dict()}, path)
    s.seen += numbers(torch.load(path, weights_only=False))


def saves_on_rank_0(s: Script) -> None:
    path = s.path()
    if _is_first():
        torch.save([s.model.state_dict(), s.optimizer.state_dict()["state"]], path)
    dist.barrier()
    s.seen += numbers(torch.load(path, weights_only=False))


def saves_the_model(s: Script) -> None:
    if s.model.keeps:
        return  # Eager copies no tensor that has a history.
    path = s.path(str(dist.get_rank()))
    torch.save(s.model, path)
    s.seen += numbers(torch.load(path, weights_only=False).state_dict())


def evaluates(s: Script) -> None:
    s.model.eval()
    with torch.no_grad():
        s.seen += numbers(s.model(torch.randn(ROWS, WIDTH)))
    s.model.train()


def copies(s: Script) -> None:
    if s.model.keeps:
        return
    copied = copy.deepcopy(s.model)
    s.seen += numbers([*copied.parameters()])


def averages(s: Script) -> None:
    with torch.no_grad():
        for ours, theirs in zip(s.average.parameters(), s.model.parameters(), strict=True):
            ours.mul_(0.9).add_(theirs.data, alpha=0.1)


def changes(s: Script) -> None:
    x, how = s.param(), s.draw.randrange(5)
    with torch.no_grad():
        if how == 0:
            x.mul_(0.99)
        elif how == 1:
            x[0] = 0.5
        elif how == 2:
            nn.init.normal_(x, std=0.3)
        elif how == 3:
            x.add_(0.01 * torch.randn(x.shape))
        else:
            x.data = x.data.clamp(-0.4, 0.4)


def loads(s: Script) -> None:
    s.model.load_state_dict({name: 0.98 * x for name, x in s.model.state_dict().items()})
    s.optimizer.load_state_dict(s.optimizer.state_dict())


BETWEEN = (
    seeds, draws, draws_on_rank_0, logs, logs_on_rank_0, saves_on_all, saves_on_rank_0,
    saves_the_model, evaluates, copies, averages, changes, loads,
)  # fmt: skip


def _labels() -> Tensor:
    return torch.randint(0, WIDTH, (ROWS,))


LOSSES: dict[str, Callable[[Script, Tensor], Tensor]] = {
    "square": lambda s, y: F.mse_loss(y, torch.randn(ROWS, WIDTH)),
    "classes": lambda s, y: F.cross_entropy(y, _labels()),
    "one-hot": lambda s, y: -(y.log_softmax(-1) * F.one_hot(_labels(), WIDTH)).sum(-1).mean(),
    "divergence": lambda s, y: F.kl_div(
        y.log_softmax(-1), torch.rand(ROWS, WIDTH).softmax(-1), reduction="batchmean"
    ),
    "head": lambda s, y: s.head(y).square().mean(),
    "picked": lambda s, y: y[torch.arange(ROWS), _labels()].exp().mean(),
    "gathered": lambda s, y: y.gather(1, _labels()[:, None]).tanh().sum(),
    "contrast": lambda s, y: F.cross_entropy(y @ y.t(), torch.arange(ROWS)),
    "dropped": lambda s, y: F.dropout(y, 0.3).square().mean(),
    "masked": lambda s, y: y.masked_fill(torch.rand(ROWS, WIDTH) < 0.4, 0).abs().mean(),
    "weighted": lambda s, y: torch.rand(()) * y.square().mean() + 0.1 * y.sum(),
    "of rows": lambda s, y: torch.stack([y[k].norm() * (k + 1) for k in range(3)]).sum(),
    "penalty": lambda s, y: y.square().mean() + 0.1 * sum(p.square().sum() for p in params(s)),
}


def params(s: Script) -> list[Tensor]:
    return [p for p in s.model.parameters() if p.dim() == 2]


def _called(s: Script) -> Any:
    x = torch.randn(ROWS, WIDTH)
    if s.model.where == "made":
        s.model.scale = s.hyper(torch.rand(3))
    if s.draw.random() < 0.15:
        weights = {n: p for n, p in s.model.named_parameters() if p.dim() == 2}
        first = s.model(x)
        first = first[0] if isinstance(first, tuple) else first.square().mean()
        grads = torch.autograd.grad(first, [*weights.values()], allow_unused=True)
        pairs = zip(weights.items(), grads, strict=True)
        fast = {n: p - 0.1 * g for (n, p), g in pairs if g is not None}
        if s.model.where == "made":
            s.model.scale = s.hyper(torch.rand(3))
        return functional_call(s.model, fast, (x,))
    return s.model(x)


def loss_of(s: Script) -> Tensor:
    made = _called(s)
    inside, y = made if isinstance(made, tuple) else (torch.zeros(()), made)
    name = s.draw.choice([*LOSSES])
    if isinstance(made, tuple) and s.draw.random() < 0.3:
        return inside
    return inside + LOSSES[name](s, y)


def run(number: int, compiled: Callable[[nn.Module, str | None], Any], folder: Path) -> Script:
    draw = random.Random(number)
    torch.manual_seed(number)
    plain = Net(draw).double()
    average = copy.deepcopy(plain).requires_grad_(False)
    head = nn.Linear(WIDTH, 3)
    model = compiled(plain, draw.choice(("fsdp", "ddp", None)))
    hyper = nn.Linear(3, 16)
    own = [*plain.outside(), *hyper.parameters(), *head.parameters()]
    how = draw.choice((torch.optim.SGD, torch.optim.AdamW))
    optimizer = how([*model.parameters(), *own], lr=0.05)
    s = Script(draw, model, optimizer, average, head, folder, hyper=hyper)
    if draw.random() < 0.3:
        s.optimizer.register_step_pre_hook(lambda o, *_: _unit(o))
    for _ in range(STEPS):
        for action in draw.sample(BETWEEN, draw.randrange(4)):
            action(s)
        for _ in range(draw.choice((1, 1, 2))):
            loss = loss_of(s)
            loss.backward()
            s.seen.append(loss.item())
            if plain.where == "made":
                model.scale = model.scale.detach()
        if draw.random() < 0.5:
            s.seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=draw.random() < 0.7)
    s.seen += numbers([*model.parameters(), *own, *average.parameters(), model.seen])
    s.seen.append(CALLED["calls"])
    s.seen.append(float(torch.rand(())))
    return s


def _unit(optimizer: torch.optim.Optimizer) -> None:
    """Gradients of unit length, as a hook makes them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1)


def all_drawn() -> dict[str, str]:
    """What is other than on one device, by number: an empty text if nothing is."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first, count = (int(os.environ[name]) for name in ("FIRST", "COUNT"))
    found: dict[str, str] = {}
    for number in range(first, first + count):
        folder = Path(os.environ["FOLDER"]) / str(number)
        own = folder / str(dist.get_rank())
        own.mkdir(parents=True, exist_ok=True)
        theirs = _as_one(number, own)
        ours = run(number, lambda m, s: autopar.compile(m, constraints={"strategy": s}), folder)
        found[str(number)] = _difference(ours.seen, theirs.seen)
        if _is_first():
            found[f"{number} alone"] = _difference(ours.alone, theirs.alone)
    return found


def _as_one(number: int, folder: Path) -> Script:
    """On one device: here each rank is the only one."""
    rank, barrier = dist.get_rank, dist.barrier
    dist.get_rank = lambda *_: 0  # type: ignore[assignment]
    dist.barrier = lambda *_: None  # type: ignore[assignment]
    try:
        return run(number, lambda m, _: m, folder)
    finally:
        dist.get_rank, dist.barrier = rank, barrier


def _difference(ours: list[float], theirs: list[float]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} numbers for {len(theirs)}"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not abs(a - b) <= TOLERANCE * max(1.0, abs(b)):
            return f"number {place} of {len(ours)}: {a!r} for {b!r}"
    return ""
