"""Processes that have their programs compared with eager before they use them."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import autopar
from autopar.driver import verify
from autopar.errors import VerificationError
from autopar.runtime.simulator.spmd import StepResult
from tests.runtime.workers import distance


def two() -> dict[str, Any]:
    """Losses of two programs under `verify=True`, each rank handing in its rows, and what is said
    of a third that is wrong on rank 0, which alone looks at it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.BatchNorm1d(16))
    model = copy.deepcopy(plain)
    compiled = autopar.compile(model, constraints={"strategy": "fsdp"}, inputs="local", verify=True)
    x = torch.randn(8, 6)
    torch.manual_seed(1)
    expected = plain(x)
    torch.manual_seed(1)
    rank = int(os.environ["RANK"])
    far = distance(compiled(x.chunk(2)[rank]), expected.chunk(2)[rank])
    compiled(torch.randn(2, 6))  # with parameters in shards
    right = verify.train_step

    def wrong(*args: Any, **kwargs: Any) -> StepResult:
        found = right(*args, **kwargs)
        next(iter(found.gradients.values())).add_(1)
        return found

    told = ""
    with patch.object(verify, "train_step", wrong):
        try:
            compiled(torch.randn(1, 6))
        except VerificationError as error:
            told = str(error)
    return {"distance": far, "told": told, "plans": len(compiled.plans)}
