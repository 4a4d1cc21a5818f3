"""A decoder from the figures of a table: GPT's block or Llama's, in bfloat16.

FSDP and Megatron train in mixed precision: what is gathered, computed, saved and reduced has two
bytes, what is stored and stepped on four. The model has bfloat16 parameters, so that its plan sends
and computes what the run did; `predict` counts what is stored in four bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published.runs import Run

DTYPE = torch.bfloat16


def _norm(run: Run) -> nn.Module:
    return nn.RMSNorm(run.hidden, eps=1e-5) if run.gated else nn.LayerNorm(run.hidden)


class _Attention(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.width, self.writes_scores = run.hidden // run.heads, run.writes_scores
        kv, bias = run.kv_heads * self.width, not run.gated
        self.q = nn.Linear(run.hidden, run.hidden, bias=bias)
        self.k = nn.Linear(run.hidden, kv, bias=bias)
        self.v = nn.Linear(run.hidden, kv, bias=bias)
        self.out = nn.Linear(run.hidden, run.hidden, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if rotation is not None:
            q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        if self.writes_scores:
            mixed = _softmax_of_scores(q, k) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _softmax_of_scores(q: Tensor, k: Tensor) -> Tensor:
    """Of what was before, `[batch, heads, sequence, sequence]`."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        ffn, bias = run.stated("ffn"), not run.gated
        self.attention_norm, self.attention = _norm(run), _Attention(run)
        self.ffn_norm = _norm(run)
        self.gate = nn.Linear(run.hidden, ffn, bias=bias) if run.gated else None
        self.up = nn.Linear(run.hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, run.hidden, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        normed = self.ffn_norm(x)
        if self.gate is not None:
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + self.down(F.gelu(self.up(normed)))


class Decoder(nn.Module):
    """The model of a run, with bfloat16 parameters.

    Llama's has gates, norms of the root mean square, rotary positions, a head of its own, and a
    loss of float32 logits. GPT's has biases, learned positions, the words' embedding as its head,
    and a loss that reads bfloat16 logits, as kernels that fuse it do.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, vocab = run, run.stated("vocab")
        self.words = nn.Embedding(vocab, run.hidden)
        if run.gated:
            self.head = nn.Linear(run.hidden, vocab, bias=False)
        else:
            self.positions = nn.Embedding(run.sequence, run.hidden)
        self.blocks = nn.ModuleList(_Block(run) for _ in range(run.layers))
        self.norm = _norm(run)
        self.to(DTYPE)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of `tokens`, int64 `[batch, sequence]`, against `labels`, as many."""
        x, rotation = self.words(tokens), None
        if self.run.gated:
            rotation = self._rotation(tokens)
        else:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        logits = self.head(x).float() if self.run.gated else F.linear(x, self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _rotation(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[sequence, width of a head]`."""
        width = self.run.hidden // self.run.heads
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        turn = torch.arange(0, width, 2, device=tokens.device, dtype=torch.float32) / width
        angles = place[:, None] * (500_000.0**-turn)[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(DTYPE), angles.sin().to(DTYPE)
