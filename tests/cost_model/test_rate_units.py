"""Speed is told in tokens where inputs are sequences of them, and in samples elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.cost_model.rates import rate_unit
from autopar.tracer import trace
from tests.grouped import grouped

B, S = 4, 24


def ids(length: int = S, most: int = 60) -> Tensor:
    return torch.randint(0, most, (B, length))


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids(), "labels": ids()}


def gpt_of_embeds() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    given = {"inputs_embeds": torch.randn(B, S, 32), "labels": ids()}
    return transformers.GPT2LMHeadModel(config), given


def encoder(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(**SMALL, attn_implementation=attention)
    given = {"input_ids": ids(), "attention_mask": torch.ones(B, S).long()}
    labels = torch.zeros(B, dtype=torch.int64)
    return transformers.BertForSequenceClassification(config), given | {"labels": labels}


def vision_transformer() -> tuple[nn.Module, dict[str, Any]]:
    more = {"image_size": 32, "patch_size": 8, "num_labels": 10}
    config = transformers.ViTConfig(**{**SMALL, **more})
    given = {"pixel_values": torch.randn(B, 3, 32, 32)}
    return transformers.ViTForImageClassification(config), given | {"labels": ids(1)[:, 0] % 10}


def speech() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, num_mel_bins=8,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=30, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    given = {"input_features": torch.randn(B, 8, 60), "labels": ids()}
    return transformers.WhisperForConditionalGeneration(config), given


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.conv(x).mean((2, 3))), y)


class Recurrent(nn.Module):
    def __init__(self, *, looks_up: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16) if looks_up else None
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = x if self.table is None else self.table(x)
        return self.head(self.lstm(found)[0][:, -1]).square().mean()


class Clicks(nn.Module):
    """Numbers and categories, whose vectors are multiplied with one another."""

    def __init__(self, *, tables: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(64, 16) for _ in range(6)] if tables else [])
        self.table, self.bottom = nn.Embedding(64, 16), nn.Linear(13, 16)
        self.top = nn.Linear(49, 1)

    def forward(self, dense: Tensor, at: Tensor, y: Tensor) -> Tensor:
        found = self.table(at)
        if self.tables:
            found = torch.stack([each(at[:, k]) for k, each in enumerate(self.tables)], 1)
        every = torch.cat([self.bottom(dense)[:, None], found], 1)
        pairs = (every @ every.mT).flatten(1)
        return F.binary_cross_entropy_with_logits(self.top(pairs)[:, 0], y)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


def clicks(*, tables: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Clicks(tables=tables), (torch.randn(B, 13), ids(6), torch.ones(B))


TOKENS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "language model": llama,
    "language model of embeddings": gpt_of_embeds,
    "encoder": lambda: encoder("sdpa"),
    "encoder with attention in ops": lambda: encoder("eager"),
    "recurrent language model": lambda: (Recurrent(looks_up=True), (ids(),)),
}
SAMPLES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "images": lambda: (Image(), (torch.randn(B, 3, 8, 8), torch.zeros(B).long())),
    "vision transformer": vision_transformer,
    "recurrent of features": lambda: (Recurrent(looks_up=False), (torch.randn(B, S, 16),)),
    "speech": speech,
    "clicks, a table for each column": lambda: clicks(tables=True),
    "clicks, one table": lambda: clicks(tables=False),
    "regression": lambda: (Regression(), (torch.randn(B, 24), torch.randn(B, 24))),
}


def counted(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[int, int]:
    model, given = make()
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    return rate_unit(trace(model, args, kwargs).graph)


@pytest.mark.parametrize("kind", TOKENS)
def test_tokens_are_told_of_sequences_of_them(kind: str) -> None:
    assert counted(TOKENS[kind]) == (B * S, 0)


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_told_of_all_else(kind: str) -> None:
    assert counted(SAMPLES[kind]) == (0, B)


def test_pages_tell_samples_of_the_whole_batch_in_microbatches_too() -> None:
    given = torch.randn(64, 24), torch.randn(64, 24)
    for microbatches in (1, 2):
        plan = autopar.plan(Regression(), given, cluster="1xH100", microbatches=microbatches)
        estimates = plan.estimates
        assert (estimates.tokens, estimates.samples) == (0, 64)
        assert f"{64 * 10**9 // estimates.step_ns:,} samples/s" in str(plan.summary())


def test_pages_tell_tokens_in_microbatches_and_stages_too() -> None:
    model, given = llama()
    for how in ({"microbatches": 2}, {"stages": 2, "microbatches": 2, "mesh": "1"}):
        plan = autopar.plan(model, given, cluster="2xH100", **grouped(**how))
        assert (plan.estimates.tokens, plan.estimates.samples) == (B * S, 0)
        assert "tokens/s" in str(plan.summary())
