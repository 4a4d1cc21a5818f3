"""Faults in attention on pieces of the sequence, and in its ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.codegen.ops import attention, zigzag
from autopar.codegen.ops.attention import Ring
from autopar.runtime.ops import attention_shard
from autopar.runtime.program import symbols
from tests.faults.table import by_test, fault, verified
from tests.runtime.test_symbols import test_each_rank_is_passed_what_the_one_before_it_had

aten = torch.ops.aten
Patch = pytest.MonkeyPatch


@fault(by_test(test_each_rank_is_passed_what_the_one_before_it_had))
def blocks_passed_to_the_rank_before(patch: Patch) -> None:
    def turned(index: Any, length: int, ways: int, axis: str) -> Any:
        op, (gets, gives, _) = original(index, length, ways, axis)
        return op, (gives, gets, axis)

    original = symbols._ON_A_RANK[symbols.permute]
    patch.setitem(symbols._ON_A_RANK, symbols.permute, turned)


@fault(verified("ring"))
def blocks_that_never_move_on(patch: Patch) -> None:
    """What comes is not what is waited for."""
    original = Ring.passed_on

    def kept(self: Ring, block: fx.Node) -> fx.Node:
        original(self, block)
        return self.p(aten.clone.default, block)

    patch.setattr(Ring, "passed_on", kept)


@fault(verified("ring"))
def blocks_taken_for_those_of_the_next_rank(patch: Patch) -> None:
    original = Ring._blocks
    patch.setattr(Ring, "_blocks", lambda self, step: original(self, step + 1))


@fault(verified("ring"))
def keys_unpacked_as_values(patch: Patch) -> None:
    original = Ring.unpacked
    patch.setattr(Ring, "unpacked", lambda self, block: original(self, block)[::-1])


@fault(verified("ring"))
def positions_that_start_anew_on_each_rank(patch: Patch) -> None:
    original = symbols._start
    patch.setattr(symbols, "_start", lambda index, piece: original(index, piece) // 2)


@fault(verified("rows"))
def queries_all_at_the_start_of_the_sequence(patch: Patch) -> None:
    original = attention._rows

    def first(p: Any, query: int) -> Any:
        rows, keys = original(p, query)
        return rows._replace(cuts=()), keys

    patch.setattr(attention, "_rows", first)


@fault(verified("rows"))
def rows_that_see_one_key_too_many(patch: Patch) -> None:
    original = symbols._start

    def late(index: Any, piece: Any) -> int:
        return original(index, piece) + bool(piece.cuts)

    patch.setattr(symbols, "_start", late)


@fault(verified("rows"))
def halves_of_the_keys_averaged(patch: Patch) -> None:
    """Not by how much each half weighs."""

    def averaged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> Any:
        return (out + more) / 2, torch.logaddexp(lse, more_lse)

    patch.setattr(attention_shard, "_merged", averaged)


@fault(verified("zigzag"))
def halves_of_the_mirror_taken_for_this_ranks(patch: Patch) -> None:
    original = zigzag._Swap.rows

    def own(self: zigzag._Swap) -> Any:
        assert original.fget is not None
        first, second = original.fget(self)
        return first, second._replace(mirrored=False)

    patch.setattr(zigzag._Swap, "rows", property(own))


@fault(verified("zigzag"))
def blocks_in_zigzag_order_taken_for_ones_in_a_row(patch: Patch) -> None:
    patch.setattr(symbols, "_chunk_of", lambda rank, num_ranks: 2 * rank)


@fault(verified("zigzag"))
def results_that_are_not_swapped_back(patch: Patch) -> None:
    def kept(self: Any, tensors: Any, shapes: Any) -> Any:
        original(self, tensors, shapes)
        return list(tensors)

    original = zigzag._Swap.back
    patch.setattr(zigzag._Swap, "back", kept)
