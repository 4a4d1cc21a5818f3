"""A language model none of whose sizes divides by much, in float64."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.codegen.models import Case, make_case

VOCAB, WIDTH, HEADS, BATCH, LENGTH = 257, 30, 3, 5, 7


class Block(nn.Module):
    """Attention and an MLP, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH + 1), nn.Linear(4 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, -1)
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Uneven(nn.Module):
    """A vocabulary and a batch of odd size, three heads, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def uneven() -> Case:
    """The model, traced once, with what eager makes of it."""
    torch.manual_seed(0)
    model = Uneven().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.2, -100, ids)
    return make_case(model, {"ids": ids, "labels": labels})
