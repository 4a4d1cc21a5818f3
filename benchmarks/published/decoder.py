"""A decoder from the figures of a table: GPT's block or Llama's, in bfloat16.

FSDP and Megatron train in mixed precision: what is gathered, computed, saved and reduced has two
bytes, what is stored and stepped on four. The model has bfloat16 parameters, so that its plan sends
and computes what the run did; what is stored is counted in four bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.published.runs import Run

DTYPE = torch.bfloat16

STORED_PER_PLANNED = 2
"""Parameters, gradients and the optimizer's states are stored in float32."""


def _norm(run: Run) -> nn.Module:
    return nn.RMSNorm(run.hidden, eps=1e-5) if run.gated else nn.LayerNorm(run.hidden)


class _Bias(torch.autograd.Function):
    """What is left to do of a bias that the product's kernel adds as it writes
    (`CUBLASLT_EPILOGUE_BIAS`, which torch's linear asks for): its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        return grad, grad.sum((0, 1))


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        made = F.linear(x, self.weight)
        return made if self.bias is None else _Bias.apply(made, self.bias)


class _Attention(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.width, self.writes_scores = run.hidden // run.heads, run.is_megatron
        self.recomputes_scores = run.recomputes_scores
        kv, bias = run.kv_heads * self.width, not run.gated
        self.q = _Linear(run.hidden, run.hidden, bias=bias)
        self.k = _Linear(run.hidden, kv, bias=bias)
        self.v = _Linear(run.hidden, kv, bias=bias)
        self.out = _Linear(run.hidden, run.hidden, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if rotation is not None:
            q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        if self.recomputes_scores:
            mixed = checkpoint(_with_scores, q, k, v, use_reentrant=False)
        elif self.writes_scores:
            mixed = _with_scores(q, k, v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _with_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As much work as Megatron's on scores, `[batch, heads, sequence, sequence]`: the product
    scales them, the kernel of the softmax masks what it reads, and one more makes some zero by
    chance (`scaled_upper_triang_masked_softmax`, `--attention-dropout`)."""
    return ((q @ k.transpose(-1, -2)).softmax(-1) * 0.9) @ v


class _FusedLoss(torch.autograd.Function):
    """As much work as flash-attn's CrossEntropyLoss, llm-foundry's default, has with logits: they
    are read once, and in backward read and written. Its value means nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return logits * grads[0]


class _UnfusedLoss(torch.autograd.Function):
    """As much work as Megatron's cross entropy of float32 logits, an op of its own for each step
    (megatron/mpu/cross_entropy.py, `output.float()` in pretrain_gpt.py), without what there is one
    of for each token: the label's. Its value means nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        powers = (logits - logits.amax(-1, keepdim=True)).exp()
        total = powers.sum(-1, keepdim=True)
        ctx.save_for_backward(powers / total)
        return total.log().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (probabilities,) = ctx.saved_tensors
        return probabilities * grads[0]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        ffn, bias = run.stated("ffn"), not run.gated
        self.attention_norm, self.attention = _norm(run), _Attention(run)
        self.ffn_norm = _norm(run)
        self.gate = _Linear(run.hidden, ffn, bias=bias) if run.gated else None
        self.up = _Linear(run.hidden, ffn, bias=bias)
        self.down = _Linear(ffn, run.hidden, bias=bias)

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
    and a loss that reads bfloat16 logits, which for MPT is one kernel, and for Megatron many that
    read float32.
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
        """The loss of `tokens`, int64 `[batch, sequence]`, against `labels`, as many; of MPT and of
        Megatron's GPT a number that takes as long."""
        x, rotation = self.words(tokens), None
        if self.run.gated:
            rotation = self._rotation(tokens)
        else:
            x = x + self.positions.weight
        for block in self.blocks:
            if self.run.recomputes:
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        x = self.norm(x)
        logits = self.head(x).float() if self.run.gated else F.linear(x, self.words.weight)
        if self.run.is_mpt:
            return _FusedLoss.apply(logits)
        if self.run.is_megatron:
            return _UnfusedLoss.apply(logits.float())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _rotation(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[sequence, width of a head]`."""
        width = self.run.hidden // self.run.heads
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        microbatch = torch.arange(0, width, 2, device=tokens.device, dtype=torch.float32) / width
        angles = place[:, None] * (500_000.0**-microbatch)[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(DTYPE), angles.sin().to(DTYPE)
