"""What the processes of `test_processes.py` do. Each function returns what its rank saw."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cluster import parse_cluster
from autopar.errors import AutoparError
from autopar.mesh import Cluster, Level, Link

STEPS = 10
BATCH, LENGTH = 8, 16


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def slow_devices() -> Cluster:
    """Four devices so slow, and links so fast, that it pays to divide all work."""
    cpus = parse_cluster("4xcpu")
    device = replace(cpus.device, flops_per_s=(("float32", 1e6),), launch_s=0.0)
    link = Link("fast", 1e12, 1e-9, "made up")
    return replace(cpus, device=device, levels=(Level(4, link),))


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 96, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    return float((whole(a).detach() - b.detach()).abs().max() / b.detach().abs().max())


Optimizer = Callable[[Any], torch.optim.Optimizer]


def train(make: Callable[[], nn.Module], optimizer: Optimizer, **options: Any) -> dict[str, Any]:
    """Train compiled and plain side by side; the largest differences of anything."""
    reference = make()
    ours = copy.deepcopy(reference)
    if dist.is_initialized() and dist.get_rank():
        # Ranks start from other values: those of rank 0 are to hold.
        with torch.no_grad():
            for param in ours.parameters():
                param.add_(1.0)
    names = list(reference.state_dict())
    model = autopar.compile(ours, **options)
    opt, ref_opt = optimizer(model.parameters()), optimizer(reference.parameters())
    ids = [id(p) for p in model.parameters()]
    seen: dict[str, Any] = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "param": 0.0}
    for step in range(STEPS):
        loss, expected = model(**batch(step)).loss, reference(**batch(step)).loss
        loss.backward()
        expected.backward()
        seen["loss"] = max(seen["loss"], distance(loss, expected))
        if step == 0:
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            seen["grad"] = max(distance(p.grad, q.grad) for p, q in pairs)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        ref_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        seen["norm"] = max(seen["norm"], distance(norm, ref_norm))
        for o in (opt, ref_opt):
            o.step()
            o.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    seen["param"] = max(distance(p, q) for p, q in pairs)
    seen["same objects"] = ids == [id(p) for p in model.parameters()]
    seen["same names"] = list(model.state_dict()) == names
    seen["tied"] = [n for n, _ in model.named_parameters()] == [
        n for n, _ in reference.named_parameters()
    ]
    seen["sharded"] = sum(
        any(not placement.is_replicate() for placement in p.placements)
        for p in model.parameters()
        if isinstance(p, DTensor)
    )
    seen["mesh"] = [axis.size for axis in model.plans[0].structure.mesh]
    return seen


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def four() -> dict[str, Any]:
    """Everything that four processes are needed for, in one start."""
    torch.set_num_threads(1)
    seen: dict[str, Any] = {
        "gpt2 adamw": train(gpt2, adamw, mesh="4", memory_limit="1100KiB"),
        "llama adamw": train(llama, adamw, cluster=slow_devices(), mesh="2x2"),
    }
    return seen
