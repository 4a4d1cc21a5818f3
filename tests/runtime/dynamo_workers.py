"""What the processes of `test_dynamo.py` do: `torch.compile(model, backend="autopar")`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.workers import adamw, distance

RANK = int(os.environ.get("RANK", "0"))


class Block(nn.Module):
    """Attention over a sequence, twice normalised, and a counter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, -1)
        return x + self.out(weights @ v)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.embed.weight.t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens(step: int) -> Tensor:
    return torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(step))


def train(backend: Any) -> dict[str, Any]:
    """Three steps beside eager, of a loss that uses both outputs."""
    ours, theirs = model(), model()
    if RANK:
        # Rank 0's values are to hold.
        with torch.no_grad():
            for param in ours.parameters():
                param.add_(1.0)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    seen: dict[str, Any] = {"loss": 0.0}
    optimizers = adamw(ours.parameters()), adamw(theirs.parameters())
    for step in range(3):
        losses: list[Tensor] = []
        for net, optimizer in zip((compiled, theirs), optimizers, strict=True):
            result = net(tokens(step), tokens(step))
            losses.append(result["loss"] + result["logits"].square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        seen["loss"] = max(seen["loss"], distance(*losses))
    seen["param"] = max(map(distance, ours.parameters(), theirs.parameters()))
    seen["calls"] = [float(layer.calls) for layer in ours.layers]
    seen["plain"] = all(type(p) is nn.Parameter for p in ours.parameters())
    return seen


def by_name() -> dict[str, Any]:
    torch.set_num_threads(1)
    return train("autopar")
