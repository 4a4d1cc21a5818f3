"""Plan files do not grow with depth."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


def stored(layers: int) -> bytes:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros((64, 256), dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    return autopar.plan(model, inputs, cluster="2xH100", mesh="2").to_bytes()


@pytest.mark.nightly
def test_blocks_of_a_class_are_written_once() -> None:
    few, many = stored(3), stored(12)
    assert few.count(b"\n") == many.count(b"\n")
    assert len(many) < 1.02 * len(few)
