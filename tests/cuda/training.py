"""Models that are trained beside eager on the same device, a GPU, and what differs."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from tests.device import device
from tests.grouped import grouped
from tests.runtime.workers import distance, whole

WORDS, ROWS, LENGTH = 512, 8, 128
STEPS = 3


def gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=WORDS, n_positions=LENGTH,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(device("cuda"))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device("cuda"))


def wide() -> nn.Module:
    """Large enough for what is held to be its tensors, and not what kernels take besides."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=1024, n_head=16, vocab_size=8192, n_positions=1024,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(device("cuda"))


def wide_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 8192, (8, 1024)).to(device("cuda"))
    return {"input_ids": ids, "labels": ids.clone()}


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator).to(device("cuda"))
    return {"input_ids": ids, "labels": ids.clone()}


def apart(a: Tensor | None, b: Tensor | None) -> float:
    """`distance` of tensors on any devices."""
    assert a is not None and b is not None
    return distance(whole(a).cpu(), b.cpu())


def trained(
    plain: nn.Module, around: AbstractContextManager[Any] | None = None, **options: Any
) -> tuple[dict[str, float], Any]:
    """The largest differences of losses, of the first step's gradients, and of parameters at the
    end, each over the largest element; and the compiled model. Forward is inside `around`."""
    around = around or nullcontext()
    ours = autopar.compile(copy.deepcopy(plain), **grouped(**options))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, plain)]
    seen = {"loss": 0.0, "grad": 0.0, "param": 0.0}
    for step in range(STEPS):
        with around:
            losses = [model(**batch(step)).loss for model in (ours, plain)]
        for loss in losses:
            loss.backward()
        seen["loss"] = max(seen["loss"], distance(*losses))
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        here = [(p, q) for p, q in pairs if p.grad is not None]
        if step == 0:
            seen["grad"] = max(apart(p.grad, q.grad) for p, q in here)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    seen["param"] = max(apart(p, q) for p, q in here)
    return seen, ours
