"""Checkpoints that are written while training goes on: the processes of `test_async.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import autopar
from tests.runtime.workers import batch, llama, staged, whole


class Model(nn.Module):
    """Of sizes that two ranks share evenly, unevenly and not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 1)
        self.odd = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).square().mean() + self.odd.square().sum()


WAYS: dict[str, dict[str, Any]] = {
    "thread": {},
    "shared": {
        "async_stager": lambda: DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
    },
    "process": {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
}  # fmt: skip


def saved_beside_training(way: str, *, in_stages: bool = False) -> dict[str, float]:
    """How far what was saved is from what was there when it was."""
    folder = Path(os.environ["FOLDER"]) / way
    model: Any = staged(llama(), microbatches=2) if in_stages else compiled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    given = batch(0) if in_stages else {"x": torch.randn(4, 8)}

    def step() -> None:
        optimizer.zero_grad()
        made = model(**given)
        (made.loss if in_stages else made).backward()
        optimizer.step()

    step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    before = _plain(states)
    options = {k: v() if k == "async_stager" else v for k, v in WAYS[way].items()}
    future: Any = dcp.async_save(states, checkpoint_id=folder, **options)
    for _ in range(3):
        step()
    future.result()
    now = _plain(states)
    assert float(sum((now[k] - before[k]).abs().sum() for k in before)) > 1  # it trained on
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, folder / "whole.pt")
    dist.barrier()
    loaded = _plain(torch.load(folder / "whole.pt", weights_only=False))
    assert loaded.keys() == before.keys()
    return {name: float((loaded[name] - value).abs().max()) for name, value in before.items()}


def compiled() -> Any:
    return autopar.compile(Model(), constraints={"strategy": "fsdp"})


def _plain(states: Any, prefix: str = "") -> dict[str, Tensor]:
    """Copies of all tensors, whole, by the way to them."""
    if isinstance(states, Tensor):
        return {prefix: whole(states).detach().clone()}
    pairs = states.items() if isinstance(states, dict) else ()
    found: dict[str, Tensor] = {}
    for name, value in pairs:
        found |= _plain(value, f"{prefix}/{name}")
    return found


def thread() -> dict[str, float]:
    return saved_beside_training("thread")


def shared() -> dict[str, float]:
    return saved_beside_training("shared")


def process() -> dict[str, float]:
    return saved_beside_training("process")


def process_of_stages() -> dict[str, float]:
    return saved_beside_training("process", in_stages=True)
