"""What processes do with sizes that do not divide. Each function returns what its rank saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from tests.grouped import grouped
from tests.runtime import workers
from tests.runtime.chunk_workers import chunks

VOCAB = 97
LEAN: dict[str, Any] = {"cluster": "3xcpu", "memory_limit": 900_000, "stages": 1}
"""So little memory that a batch of 8 leaves no room for all parameters whole, whatever is made
again for backward."""


def gpt2() -> nn.Module:
    """Hardly any of its sizes can be divided by 3."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=workers.LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def three() -> dict[str, Any]:
    """Training on three processes under random decisions."""
    torch.set_num_threads(1)
    plan = workers.stored_plan(gpt2(), workers.batch(0), "3", 1)
    return {
        "chunks": chunks(3),
        "random": workers.train(gpt2, workers.adamw, 3, plan=plan),
    }


def three_lean() -> dict[str, Any]:
    """Training under a plan for little memory, and batches of other sizes."""
    torch.set_num_threads(1)
    return {"lean": workers.train(gpt2, workers.adamw, 3, **LEAN), "shapes": shapes()}


def shapes() -> dict[str, Any]:
    """A second program of a model, for a batch of 1 that leaves room to store otherwise."""
    model: Any = autopar.compile(gpt2(), **grouped(**LEAN))
    losses: list[float] = []
    for rows in (8, 1):
        some = {name: tensor[:rows] for name, tensor in workers.batch(0).items()}
        losses.append(workers.distance(model(**some).loss, gpt2()(**some).loss))
        model(**some).loss.backward()
    first, second = (
        {name: param.storage for name, param in plan.structure.params.items()}
        for plan in model.plans
    )
    grads = {
        name: isinstance(param.grad, DTensor) and param.grad.placements == param.placements
        for name, param in model.named_parameters()
    }
    return {
        "loss": max(losses),
        "same": first == second,
        "sharded": sum(text != "[R]" for text in first.values()),
        "grads": all(grads.values()),
    }
