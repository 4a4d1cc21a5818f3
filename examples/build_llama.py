r"""Targets for `autopar plan`: Llama of 8 and of 405 billion parameters, and a small one.

autopar plan examples/build_llama.py:build --cluster 8x8xH100 --global-batch 64 -o llama.json
autopar plan examples/build_llama.py:build_405b --cluster 64x8xB200 --mesh 64x8 --global-batch 512 \
    -o examples/llama-405b.plan.json
autopar plan examples/build_llama.py:build_tiny --cluster 4xcpu --global-batch 8 -o tiny.json
autopar verify tiny.json examples/build_llama.py:build_tiny --global-batch 8
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

Inputs = Callable[[int], dict[str, torch.Tensor]]


def build() -> tuple[LlamaForCausalLM, Inputs]:
    """8 billion parameters in bfloat16, sequences of 2,048 tokens."""
    return _llama(hidden=4096, intermediate=14_336, layers=32, heads=32)


def build_405b() -> tuple[LlamaForCausalLM, Inputs]:
    """405 billion parameters in bfloat16, 126 layers, sequences of 2,048 tokens."""
    return _llama(hidden=16_384, intermediate=53_248, layers=126, heads=128)


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int
) -> tuple[LlamaForCausalLM, Inputs]:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        use_cache=False,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    return model.bfloat16(), _tokens(config.vocab_size, 2048)


def build_tiny() -> tuple[LlamaForCausalLM, Inputs]:
    """Two layers in float32, small enough to run."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config), _tokens(config.vocab_size, 32)


def _tokens(vocab_size: int, sequence: int) -> Inputs:
    def inputs(batch: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, vocab_size, (batch, sequence))
        return {"input_ids": tokens, "labels": tokens}

    return inputs
