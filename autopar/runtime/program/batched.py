"""Several backwards at once, as `torch.autograd.grad(is_grads_batched=True)` has them: a program
runs them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.dtensor_private import dtensor_of, shard_of
from autopar.runtime.torch_private import as_batch, is_batched, rows_of_batch

Backward = Callable[[Mapping[str, Tensor]], Sequence[Tensor | None]]
"""From the gradients of results, by position, to those of parameters."""


def one_by_one(backward: Backward, given: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The results of `backward` for gradients some of which are batched, as a batch."""
    rows = {name: rows_of_batch(x) for name, x in given.items() if is_batched(x)}
    (size,) = {len(x) for x in rows.values()}
    each = [backward({**given, **{name: x[k] for name, x in rows.items()}}) for k in range(size)]
    return [_together(list(of_one)) for of_one in zip(*each, strict=True)]


def _together(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The gradients of one parameter, as a batch."""
    there = [x for x in gradients if x is not None]
    if not there:
        return None
    first = there[0]
    if not isinstance(first, DTensor):
        return as_batch(torch.stack(there))
    shards = torch.stack([shard_of(x) for x in there if isinstance(x, DTensor)])
    like = torch.empty((len(there), *first.shape), dtype=first.dtype, device="meta")
    places = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in first.placements]
    return as_batch(dtensor_of(shards, like, first.device_mesh, places))
