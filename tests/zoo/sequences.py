"""A sequence model of one's own: einsum, attention and recurrences spelled out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SEQ, VOCAB, WIDTH, HEADS = 4, 8, 24, 16, 4


class _Attention(nn.Module):
    """Causal attention with a bias by distance, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HEADS, WIDTH, WIDTH // HEADS) / 4)
        self.out = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, WIDTH) / 4)
        self.slope = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsw,chwd->cbhsd", x, self.qkv)
        scores = torch.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(q.shape[-1])
        steps = torch.arange(x.shape[1], device=x.device)
        scores = scores - self.slope.exp()[:, None, None] * (steps[:, None] - steps).abs()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("bhst,bhtd,hdw->bsw", weights, v, self.out)


class _Mixer(nn.Module):
    """A gated running mean over time, a convolution over time, and the best of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)
        mean = x.cumsum(1) / counts[:, None]
        value, gate = self.gate(self.norm(x)).chunk(2, -1)
        near = self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        best = x.topk(4, -1).values.sum(-1, keepdim=True)
        return x + F.softplus(gate) * value.clamp(-2, 2) + F.silu(near) * mean + 0.1 * best


class Sequence(nn.Module):
    """A block over embeddings, and a loss of several terms; the embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleList([_Attention(), _Mixer()]) for _ in range(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, target: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for attention, mixer in self.blocks:
            x = mixer(x + attention(x))
        self.steps += 1
        logits = torch.einsum("bsw,vw->bsv", x, self.embed.weight)
        picked = logits.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
        likelihood = -(picked * weight).sum() / weight.sum()
        order = logits.sort(-1).values[..., -2:].mean()
        spread = F.kl_div(
            logits.log_softmax(-1), logits.flip(-1).softmax(-1).detach(), reduction="batchmean"
        )
        robust = F.huber_loss(x, x.roll(1, 1).detach(), delta=0.5)
        size = torch.where(x > 0, x, -0.5 * x).pow(2).mean().sqrt() + x.norm(dim=-1).mean()
        return {"loss": likelihood + 0.1 * (order + spread + robust + size), "logits": logits}


def sequence() -> tuple[nn.Module, dict[str, Tensor]]:
    return Sequence(), {
        "ids": torch.randint(VOCAB, (BATCH, SEQ)),
        "target": torch.randint(VOCAB, (BATCH, SEQ)),
        "weight": torch.rand(BATCH, SEQ),
    }
