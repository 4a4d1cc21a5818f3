"""LoRA of a language model, for `test_scripts.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import default_collate

from tests.integrations.trainer_workers import LENGTH, Rows, gpt2


def lora() -> nn.Module:
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True,
        lora_dropout=0.0, task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(0)
    return get_peft_model(gpt2(), config)


def script(make: Callable[[], Any], folder: str) -> dict[str, Any]:
    """Trains the adapters, saves them, and merges what was saved into a plain model."""
    model = make()
    assert isinstance(model, PeftModel)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses: list[float] = []
    rows = Rows(16)
    for start in range(0, 16, 4):
        batch = default_collate([rows[i] for i in range(start, start + 4)])
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    merged = PeftModel.from_pretrained(gpt2(), folder).merge_and_unload()
    merged.eval()
    logits = merged(input_ids=torch.arange(LENGTH)[None]).logits
    return {
        "losses": losses,
        "merged": logits.square().mean((0, 2)).tolist(),
        "frozen without gradient": all(p.grad is None for p in model.parameters()),
        "adapters": sum(p.requires_grad for p in model.parameters()),
    }
