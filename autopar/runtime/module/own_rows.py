"""Results of a call to which each rank passed rows of its own: the rank's rows of them.

What a script does with them is what it does under `DistributedDataParallel`: its labels are those
of the same rows, and its loss is one of them. The gradient is that of the mean of the ranks'
losses. What has no rows, such as a loss that the model computes, is that of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from autopar.runtime.process.rows import gather_own_rows
from autopar.runtime.process.world import World
from autopar.runtime.program.sharded import ShardedOutput, whole_of


def rows_of_rank(value: Tensor, world: World, dim: int, counts: tuple[int, ...] | None) -> Tensor:
    """This rank's rows of a result whose `dim` has those of all ranks, which were handed so many
    each; as many each for None. Of one that has more, such as a token of a row, as many of each."""
    if world.size == 1:
        return value
    size = value.shape[dim]
    handed = counts or (1,) * world.size
    each = size // sum(handed)
    return _Rows.apply(value, world, dim, tuple(each * count for count in handed))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, whole: Tensor, world: World, dim: int, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.of = world, dim, counts  # pyright: ignore[reportAttributeAccessIssue]
        is_even = len(set(counts)) == 1
        if is_even and isinstance(whole, ShardedOutput) and _is_by_rows(whole, world, dim):
            return whole.piece.detach()
        return whole_of(whole).split(counts, dim)[world.rank].clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, tangent: Tensor
    ) -> tuple[Tensor, None, None, None]:
        world, dim, counts = ctx.of  # pyright: ignore[reportAttributeAccessIssue]
        gathered = gather_own_rows(tangent.movedim(dim, 0), counts).movedim(0, dim)
        return gathered / world.size, None, None, None


def _is_by_rows(value: ShardedOutput, world: World, dim: int) -> bool:
    """Whether the piece that this rank has of it are its rows."""
    mesh, placements = value.device_mesh, value.placements
    in_order = mesh is not None and mesh.mesh.flatten().tolist() == list(range(world.size))
    is_even = value.shape[dim] % world.size == 0
    return in_order and is_even and all(p.is_shard(dim) for p in placements)
