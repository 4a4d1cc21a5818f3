"""Small models for the tracer's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BATCH, SEQ, VOCAB = 2, 6, 56


def token_inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def gpt2(dropout: float = 0.0, num_layers: int = 2) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=num_layers,
            n_embd=32,
            n_head=4,
            n_positions=16,
            vocab_size=VOCAB,
            attn_pdrop=dropout,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
    )


def llama(num_layers: int = 2, **more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(llama_config(num_layers, **more))


def llama_config(num_layers: int, **more: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": 40,
        "head_dim": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32,
    }
    return LlamaConfig(num_hidden_layers=num_layers, **{**sizes, **more})
