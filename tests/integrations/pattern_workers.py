"""What public scripts do beside a model, each a small script of our own: the processes of
`test_patterns.py`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

VOCAB, WIDTH, LENGTH = 29, 16, 12


class Language(nn.Module):
    """A recurrent language model that is handed its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Dropout(0.1)
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        made, state = self.rnn(self.drop(self.table(ids)), state)
        return self.head(made).flatten(0, 1).log_softmax(-1), state

    def init_state(self, rows: int) -> tuple[Tensor, Tensor]:
        zeros = next(self.parameters()).new_zeros(2, rows, WIDTH)
        return zeros, zeros


class Blocks(nn.Module):
    """A feed-forward model of tokens with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.drop = nn.Dropout(0.1)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        scores = self.head(x + self.drop(self.inner(x)))
        return scores, F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Auto(nn.Module):
    """A variational autoencoder, parts of which are called alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z).sigmoid()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encoder(x).chunk(2, -1)
        return self.decode(mean + torch.randn_like(log) * (log / 2).exp()), mean, log


class Recommending(nn.Module):
    """Tables that are looked up sparsely, by lists of ids and of where rows begin."""

    def __init__(self) -> None:
        super().__init__()
        sizes = 20, 30, 10
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum", sparse=True) for n in sizes)
        self.top = nn.Linear(4 * (len(sizes) + 1), 1)
        self.bottom = nn.Linear(5, 4)

    def forward(self, dense: Tensor, ids: list[Tensor], starts: list[Tensor]) -> Tensor:
        found = [t(i, s) for t, i, s in zip(self.tables, ids, starts, strict=True)]
        return self.top(torch.cat([self.bottom(dense).relu(), *found], 1)).sigmoid()


Compile = Callable[[nn.Module], Any]
Seen = dict[str, list[float]]


def _numbers(state: Any) -> list[float]:
    """All that is in what was saved, in its order."""
    if isinstance(state, Tensor):
        return state.double().flatten().tolist()
    if isinstance(state, dict):
        return [x for value in state.values() for x in _numbers(value)]
    if isinstance(state, (list, tuple)):
        return [x for value in state for x in _numbers(value)]
    return [float(state)] if isinstance(state, int | float) else []


def accumulates_and_resumes(compiled: Compile, folder: Path) -> Seen:
    """Batches drawn by chance, prefetched, accumulated, clipped, evaluated, saved by all, and
    resumed from the file."""
    losses: list[float] = []
    data = torch.arange(400) * 7 % VOCAB

    def batch() -> tuple[Tensor, Tensor]:
        at = torch.randint(len(data) - LENGTH - 1, (8,))
        rows = torch.stack([data[k : k + LENGTH + 1] for k in at.tolist()])
        return rows[:, :-1], rows[:, 1:]

    path = folder / "resumed.pt"
    for run in range(2):
        torch.manual_seed(1337)
        plain = Blocks()
        saved = torch.load(path, weights_only=True) if run else None
        if saved:
            plain.load_state_dict(saved["model"])
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
        model = compiled(plain)
        x, y = batch()
        for _ in range(3):
            for _ in range(2):
                loss = model(x, y)[1] / 2
                x, y = batch()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [model(*batch())[1].item() for _ in range(2)]
        model.train()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return {"losses": losses, "saved": _numbers(torch.load(path, weights_only=True))}


def averages_and_saves_on_rank_0(compiled: Compile, folder: Path) -> Seen:
    """An average that is a plain copy, times and noise drawn outside, files written by rank 0."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.SiLU(), nn.Linear(32, WIDTH))
    average = copy.deepcopy(plain).requires_grad_(False)
    model = compiled(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    path = folder / "averaged.pt"
    for step in range(4):
        x = torch.randn(8, WIDTH)
        time, noise = torch.randint(0, 10, (8, 1)) / 10, torch.randn(8, WIDTH)
        made = model(torch.cat([time * x + (1 - time) * noise, time], 1))
        loss = (made - noise).square().mean(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs.data, alpha=0.1)
        losses.append(loss.item())
        if step == 2:
            if dist.get_rank() == 0:
                states = {"model": model, "average": average, "optimizer": optimizer}
                torch.save({name: each.state_dict() for name, each in states.items()}, path)
            dist.barrier()
    return {"losses": losses, "saved": _numbers(torch.load(path, weights_only=True))}


def hands_states_on_and_saves_the_model(compiled: Compile, folder: Path) -> Seen:
    """Truncated backpropagation, steps by hand, and a file of the whole model."""
    torch.manual_seed(0)
    model = compiled(Language())
    text = torch.randint(0, VOCAB, (61, 6))
    state, losses = model.init_state(6), list[float]()
    for at in range(0, 60, 15):
        model.zero_grad()
        made, state = model(text[at : at + 15], tuple(x.detach() for x in state))
        loss = F.nll_loss(made, text[at + 1 : at + 16].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-2.0)
        losses.append(loss.item())
    path = folder / f"model{dist.get_rank()}.pt"
    torch.save(model, path)
    loaded = torch.load(path, weights_only=False)
    assert type(loaded) is Language
    made, _ = loaded.eval()(text[:15], loaded.init_state(6))
    return {"losses": losses, "saved": _numbers(loaded.state_dict()), "made": _numbers(made)}


def samples_from_a_part(compiled: Compile, _folder: Path) -> Seen:
    """Losses outside, of several outputs, and samples by a part of the model that is called."""
    torch.manual_seed(1)
    model = compiled(Auto())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen: Seen = {"losses": [], "samples": []}
    for _ in range(3):
        x = torch.rand(8, WIDTH)
        optimizer.zero_grad()
        made, mean, log = model(x)
        apart = -0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())
        loss = F.binary_cross_entropy(made, x, reduction="sum") + apart
        loss.backward()
        optimizer.step()
        seen["losses"].append(loss.item())
        with torch.no_grad():
            seen["samples"] += _numbers(model.decode(torch.randn(3, 4)))
    return seen


def looks_up_sparsely(compiled: Compile, _folder: Path) -> Seen:
    """Sparse gradients, and inputs in lists, of other lengths in each batch."""
    torch.manual_seed(2)
    model = compiled(Recommending())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for rows in (6, 6, 4):
        counts = [torch.randint(1, 3, (rows,)) for _ in range(3)]
        ids = [torch.randint(0, 10, (int(each.sum()),)) for each in counts]
        starts = [each.cumsum(0) - each for each in counts]
        truth = torch.rand(rows, 1).round()
        loss = F.binary_cross_entropy(model(torch.rand(rows, 5), ids, starts), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach().cpu().numpy()))
    return {"losses": losses, "params": _numbers([p.detach() for p in model.parameters()])}


PATTERNS: dict[str, Callable[[Compile, Path], Seen]] = {
    each.__name__: each
    for each in (
        accumulates_and_resumes, averages_and_saves_on_rank_0, hands_states_on_and_saves_the_model,
        samples_from_a_part, looks_up_sparsely,
    )
}  # fmt: skip


def all_patterns() -> dict[str, float]:
    """By script and strategy, how far what it has seen is from what one process does."""
    dist.init_process_group("gloo")
    folder = Path(os.environ["FOLDER"])
    found: dict[str, float] = {}
    for name, script in PATTERNS.items():
        own = folder / f"plain{dist.get_rank()}"
        own.mkdir(exist_ok=True)
        theirs = _alone(script, own)
        for strategy in ("fsdp", None):
            if strategy and script is looks_up_sparsely:
                continue  # of four rows, which three ranks cannot share
            together = folder / f"{name}{strategy}"
            together.mkdir(exist_ok=True)
            ours = script(
                lambda m, s=strategy: autopar.compile(m, constraints={"strategy": s}), together
            )
            assert ours.keys() == theirs.keys()
            found[f"{name} {strategy}"] = max(
                abs(a - b) for key in theirs for a, b in zip(ours[key], theirs[key], strict=True)
            )
    return found


def _alone(script: Callable[[Compile, Path], Seen], folder: Path) -> Seen:
    """What the script does on one device: here each rank is the only one."""
    rank = dist.get_rank
    dist.get_rank = lambda *_: 0  # type: ignore[assignment]
    try:
        return script(lambda model: model, folder)
    finally:
        dist.get_rank = rank
