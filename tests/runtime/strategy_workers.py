"""What the processes of `test_strategies.py` do: models compiled and trained as users ask."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import NotImposedWarning
from autopar.runtime.program.sharded import ShardedOutput
from tests.runtime.dynamo_workers import model
from tests.runtime.workers import distance

RANK = int(os.environ.get("RANK", "0"))
BATCHES = (4, 4, 3)
"""The last of these does not divide by two ranks."""


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [
        {name: torch.randint(0, 32, (size, 6)) for name in ("ids", "labels")} for size in BATCHES
    ]


def two() -> dict[str, Any]:
    """Training under fsdp, through a batch that it cannot share; what torch.compile says."""
    plain = model()
    compiled = autopar.compile(
        copy.deepcopy(plain),
        constraints={"strategy": "fsdp", "pins": {"output:logits": "S(1) on dp"}},
    )
    told: list[str] = []
    losses: list[float] = []
    logits: list[str] = []
    for batch in batches():
        expected = plain(**batch)["loss"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            returned = compiled(**batch)
        told += [str(w.message) for w in caught if issubclass(w.category, NotImposedWarning)]
        losses.append(distance(returned["loss"], expected))
        shown = returned["logits"]
        logits.append(str(shown.placements[0]) if isinstance(shown, ShardedOutput) else "whole")
        for loss, found in ((expected, plain), (returned["loss"], compiled)):
            loss.backward()
            optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    params = list(compiled.parameters())
    return {
        "losses": max(losses),
        "params": max(map(distance, params, plain.parameters())),
        "sharded": all(isinstance(p, DTensor) and p.placements[0].is_shard() for p in params),
        "logits": logits,
        "told": told,
        "dynamo": _dynamo(plain),
    }


def _dynamo(plain: nn.Module) -> dict[str, Any]:
    """The loss under ddp, and why fsdp cannot be."""
    batch = batches()[0]
    options = {"strategy": "ddp"}
    loss = torch.compile(copy.deepcopy(plain), backend="autopar", options=options)(**batch)["loss"]
    torch.compiler.reset()
    try:
        torch.compile(plain, backend="autopar", options={"strategy": "fsdp"})(**batch)
    except Exception as error:  # dynamo's own, with autopar's inside
        return {"loss": distance(loss, plain(**batch)["loss"]), "told": str(error)}
    return {}
