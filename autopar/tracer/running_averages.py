"""Batch norms whose running statistics are the average of all batches so far (`momentum=None`), as
`torch.optim.swa_utils.update_bn` has them.

PyTorch reads how many batches there were, which is known only when the model runs. The same average
is computed here from that number as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.replacing import replaced
from autopar.tracer.torch_private import AnyBatchNorm


def averages_as_tensors() -> AbstractContextManager[None]:
    """Inside, such norms can be traced."""
    return replaced((AnyBatchNorm, "forward", _averaging(AnyBatchNorm.forward)))


def averages(module: nn.Module) -> bool:
    """Whether a norm's running statistics are averages of all batches so far."""
    return getattr(module, "num_batches_tracked", None) is not None and module.momentum is None


def _averaging(plain: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not (averages(self) and self.training and self.track_running_stats):
            return plain(self, x)
        # The statistics of this batch alone, in tensors of their own: backward keeps those that
        # they are written to.
        own = {name: self.get_buffer(name) for name in ("running_mean", "running_var")}
        of_batch = {name: each.clone() for name, each in own.items()}
        self._buffers.update(of_batch)
        self.momentum = 1.0
        try:
            y = plain(self, x)
        finally:
            self.momentum = None
            self._buffers.update(own)
        with torch.no_grad():
            # As exact as Python's number, which eager divides by.
            share = 1.0 / self.num_batches_tracked.double()
            for name, each in own.items():
                each.copy_(share * of_batch[name] + (1 - share) * each)
        return y

    return forward
