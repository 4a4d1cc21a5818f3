"""Rows of the batch that each rank is handed by itself (`inputs="local"`), not as many on each.

A batch that ranks have unevenly, such as the last one of a loader, is put together on all of them:
its rows in order of rank, as where there are as many on each.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.process.own_group import own_group

_MOST = 16
"""How many tensors of a call are compared; of more, ranks have as many rows each."""


def row_shapes(tensors: Sequence[Tensor]) -> list[int]:
    """What ranks compare of the tensors of which each has rows of its own, `_MOST + 1` numbers:
    what must be equal, as one, and how many rows each has."""
    rest = [(str(x.dtype), x.shape[1:]) for x in tensors]
    counts = [x.shape[0] for x in tensors]
    if len(counts) > _MOST:
        rest, counts = [*rest, *counts], []
    return [zlib.crc32(repr(rest).encode()), *counts, *[0] * (_MOST - len(counts))]


def gather_own_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all ranks, in order of rank, `counts` of each. A collective call."""
    missing = max(counts) - rows.shape[0]
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)).contiguous()
    # As bytes: not every backend sends every dtype.
    mine = padded.reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=own_group())
    wholes = (part.view(rows.dtype).reshape(padded.shape) for part in parts)
    return torch.cat([whole[:count] for whole, count in zip(wholes, counts, strict=True)])
