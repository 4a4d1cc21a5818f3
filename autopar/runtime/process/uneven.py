"""DTensors of which ranks have unlike pieces, some of them nothing, and what can be done with them.

DTensor computes what there is of a result from each piece, and reduces that over ranks. An op that
has no result of nothing (`max`, `median`, a norm of order infinity) fails on the ranks that have
nothing, and one that weighs all pieces alike is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

aten = torch.ops.aten

_OF_PIECES = frozenset({aten._to_copy.default, aten.sum.default, aten.sum.dim_IntList})


def is_any_uneven(given: Iterable[Any]) -> bool:
    """Whether some rank may have less than another of one of the DTensors among `given`."""
    return any(isinstance(x, DTensor) and _is_uneven(x) for x in given)


def _is_uneven(x: DTensor) -> bool:
    ways = [1] * x.dim()
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if isinstance(placement, Shard):
            ways[placement.dim] *= size
    return any(size % number for size, number in zip(x.shape, ways, strict=True))


def adds_up(op: Any, args: Sequence[Any]) -> bool:
    """Whether what an op makes of an empty piece is there, and adds nothing to what it makes of the
    others."""
    if op in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
        return 0 < (args[1] if len(args) > 1 else 2) < inf
    return op in _OF_PIECES or "foreach" in op.name()


def added_up(x: Tensor) -> Tensor:
    """A result that is not partial: DTensor refuses, or takes for whole, much that one would do
    with a part."""
    if isinstance(x, DTensor) and any(p.is_partial() for p in x.placements):
        whole = [Replicate() if p.is_partial() else p for p in x.placements]
        return x.redistribute(placements=whole)
    return x
