"""What symbols of unbound graphs are on each rank."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.program.symbols import (
    mirror,
    on_rank,
    permute,
    zigzag_block,
    zigzag_slice,
)

WAYS, LENGTH = 3, 4


def test_each_rank_is_passed_what_the_one_before_it_had() -> None:
    """What one gets is what the other gives."""
    found = [on_rank(permute, (LENGTH, WAYS, "ring"), {"ring": k}) for k in range(WAYS)]
    for here, (_, (gets, gives, axis)) in enumerate(found):
        before, after = (here - 1) % WAYS, (here + 1) % WAYS
        assert gets == [LENGTH * (peer == before) for peer in range(WAYS)]
        assert gives == [LENGTH * (peer == after) for peer in range(WAYS)]
        assert axis == "ring"


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("length", range(1, 6))
def test_blocks_in_zigzag_order_are_what_the_mask_leaves(num_ranks: int, length: int) -> None:
    """Each rank swaps its second half with its mirror and puts the earlier chunk first. The rows
    and columns that it computes in each step are those that the causal mask leaves, and work
    differs by no more than the middle row of an odd shard."""
    kept = length - length // 2
    shards = torch.arange(num_ranks * length).view(num_ranks, length)
    had = []
    for rank in range(num_ranks):
        _, (gets, gives, _) = on_rank(mirror, (length - kept, num_ranks, "cp"), {"cp": rank})
        assert gets == gives
        (peer,) = [k for k, n in enumerate(gets) if n] or [rank]
        own, came = shards[rank, :kept], shards[peer, kept:]
        given = (0, (0, length), (kept, kept + length), num_ranks, "cp")
        op, args = on_rank(zigzag_slice, given, {"cp": rank})
        had.append(op(torch.cat([own, came, own]), *args))
        assert had[-1].tolist() == sorted(had[-1].tolist())
    assert sorted(torch.cat(had).tolist()) == list(range(num_ranks * length))
    for rank, queries in enumerate(had):
        seen = 0
        for step in range(1, num_ranks):
            keys = had[(rank - step) % num_ranks]
            left = queries[:, None] >= keys[None]
            given = ("k", "v", None, step, length, num_ranks, "cp")
            _, (*_, first_row, num_keys) = on_rank(zigzag_block, given, {"cp": rank})
            computed = torch.zeros_like(left)
            computed[first_row:, :num_keys] = True
            assert torch.equal(left, computed)
            seen += int(left.sum())
        even = (num_ranks - 1) * length * length / 2
        assert abs(seen - even) <= (num_ranks - 1) * length / 2 * (length % 2)
