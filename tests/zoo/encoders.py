"""Models of `transformers` that see all positions at once, and T5, which has both halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.zoo.decoders import BATCH, SEQ, VOCAB, tokens


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        vocab_size=VOCAB, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    inputs = tokens()
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 5:] = 0
    kinds = torch.randint(2, (BATCH, SEQ))
    return BertForMaskedLM(config), {**inputs, "attention_mask": mask, "token_type_ids": kinds}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
        image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=6,
    )  # fmt: skip
    images = torch.randn(BATCH, 3, 8, 8)
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(6, (BATCH,)),
    }


def _t5() -> T5Config:
    return T5Config(
        d_model=16, d_kv=4, num_heads=4, d_ff=24, num_layers=1, vocab_size=VOCAB, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False, relative_attention_num_buckets=8,
    )  # fmt: skip


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    return T5ForConditionalGeneration(_t5()), tokens()


class _Pooled(nn.Module):
    """An encoder under a head and a loss of one's own."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids).last_hidden_state
        return nn.functional.cross_entropy(self.head(states.mean(1)), labels)


def t5_encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    return _Pooled(T5EncoderModel(_t5()), 16), {
        "input_ids": ids,
        "labels": torch.randint(3, (BATCH,)),
    }
