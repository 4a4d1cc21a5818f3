"""Language models of `transformers` that read from left to right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BATCH, SEQ, VOCAB = 4, 8, 48

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def tokens() -> dict[str, Tensor]:
    """Ids, and labels of which some are ignored, more in one row than in others."""
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def opt() -> tuple[nn.Module, dict[str, Tensor]]:
    """Padded on the right, as a batch of sentences is."""
    config = OPTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, ffn_dim=24, vocab_size=VOCAB,
        max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.0, use_cache=False,
        pad_token_id=1,
    )  # fmt: skip
    inputs = tokens()
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 5:] = 0
    return OPTForCausalLM(config), {**inputs, "attention_mask": mask}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=4, n_positions=16, vocab_size=VOCAB, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config), tokens()


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    return LlamaForCausalLM(LlamaConfig(**SHAPE)), tokens()


def qwen() -> tuple[nn.Module, dict[str, Tensor]]:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)), tokens()


def gemma() -> tuple[nn.Module, dict[str, Tensor]]:
    """Caps on scores and logits, and every other layer with a sliding window."""
    config = Gemma2Config(**{**SHAPE, "num_hidden_layers": 2}, sliding_window=4)
    return Gemma2ForCausalLM(config), tokens()


def mixtral(
    activation: str = "silu", *, balanced: bool = True
) -> tuple[nn.Module, dict[str, Tensor]]:
    """With the loss that balances experts over a batch, or without it."""
    config = MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=balanced,
        experts_implementation="eager", hidden_act=activation,
    )  # fmt: skip
    return MixtralForCausalLM(config), tokens()


def grouped() -> tuple[nn.Module, dict[str, Tensor]]:
    """Experts whose gate autopar does not know, computed by the grouped matmuls of the library."""
    return mixtral("mish")
