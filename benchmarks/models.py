"""The models that are measured, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from benchmarks.resnet import ResNet

LLAMAS = {
    "8b": (4096, 14_336, 32, 32),
    "70b": (8192, 28_672, 80, 64),
    "405b": (16_384, 53_248, 126, 128),
}
"""Hidden and intermediate size, layers and heads of Llama 3."""


def llama_8b(layers: int) -> nn.Module:
    """Llama-8B with `layers` layers instead of 32, in bfloat16."""
    return llama("8b", layers)


def llama(size: str, layers: int | None = None) -> nn.Module:
    """One of `LLAMAS` in bfloat16, with `layers` layers instead of its own."""
    hidden, intermediate, its_layers, heads = LLAMAS[size]
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or its_layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return _cast(LlamaForCausalLM(config))


def _cast(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def llama_block(*, tiny: bool) -> nn.Module:
    """One layer of Llama-8B between an embedding and a head of 32,000 words; `tiny`: a CPU's."""
    config = LlamaConfig(
        vocab_size=256 if tiny else 32_000,
        hidden_size=64 if tiny else 4096,
        intermediate_size=192 if tiny else 14_336,
        num_hidden_layers=1,
        num_attention_heads=8 if tiny else 32,
        num_key_value_heads=4 if tiny else 8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2(*, tiny: bool, dropout: float = 0.0) -> nn.Module:
    """GPT-2 of 124 million parameters, without dropout in attention; `tiny`: two layers of width
    64."""
    config = GPT2Config(
        vocab_size=256 if tiny else 50_257,
        n_embd=64 if tiny else 768,
        n_layer=2 if tiny else 12,
        n_head=4 if tiny else 12,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def tokens(vocab_size: int, batch: int, sequence: int, device: str) -> dict[str, Any]:
    """A batch to train on: `[batch, sequence]` random words, which are the labels too."""
    generator = torch.Generator().manual_seed(0)
    if device == "meta":
        words = torch.empty(batch, sequence, dtype=torch.int64, device=device)
    else:
        words = torch.randint(0, vocab_size, (batch, sequence), generator=generator).to(device)
    return {"input_ids": words, "labels": words}


def gpt2_small(
    *, width: int = 256, layers: int = 4, heads: int = 4, words: int = 2048, sequence: int = 128
) -> nn.Module:
    """GPT-2 without dropout, of 3.7 million parameters if nothing else is asked for."""
    config = GPT2Config(
        vocab_size=words,
        n_positions=sequence,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def llama_small(
    *,
    width: int = 256,
    inner: int = 640,
    layers: int = 4,
    heads: int = 8,
    words: int = 2048,
    sequence: int = 128,
) -> nn.Module:
    """A Llama, of 3.8 million parameters if nothing else is asked for."""
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def mixtral_small() -> nn.Module:
    """A Mixtral of 2.4 million parameters: two layers of eight experts, two of them per word."""
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def resnet_small() -> nn.Module:
    """A ResNet of 0.7 million parameters for images of 32 x 32."""
    return ResNet(width=32, blocks=(2, 2, 2), classes=10)


def images(classes: int, batch: int, size: int) -> dict[str, Any]:
    """`[batch, 3, size, size]` random images, and their labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, size, size, generator=generator)
    labels = torch.randint(0, classes, (batch,), generator=generator)
    return {"images": pixels, "labels": labels}


class FeedForward(nn.Module):
    """Layers without attention between a table and a head; forward is the loss."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def feed_forward(width: int, layers: int, words: int) -> nn.Module:
    """`FeedForward` in bfloat16."""
    return _cast(FeedForward(width, layers, words))
