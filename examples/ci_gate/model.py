"""A small language model, for the gate to guard."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, LAYERS, WORDS, SEQUENCE = 512, 2048, 2, 8192, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(self.norm(x))
        return x + self.down(F.gelu(wide, approximate="tanh"))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build():
    """The model, and its inputs as a function of the global batch."""

    def inputs(batch: int) -> dict[str, Tensor]:
        words = torch.zeros(batch, SEQUENCE, dtype=torch.long)
        return {"words": words, "labels": words}

    return Toy(), inputs
