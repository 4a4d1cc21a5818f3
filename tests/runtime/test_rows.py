"""Ranks that are handed rows of their own may have other numbers of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.rows_workers import OPTIONS
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.rows_workers.two", 2)


@pytest.mark.parametrize("options", OPTIONS)
def test_uneven_rows_are_one_batch(ranks: list[Any], options: str) -> None:
    for rank in ranks:
        seen = dict(rank[options])
        # Five rows, four, three, and with edges: what divides takes the even program.
        assert seen.pop("programs") == 4
        assert len(seen) == 7
        for name, off in seen.items():
            assert max(off.values()) < 1e-12, name


def test_rows_of_another_length_are_told_and_the_next_call_works(ranks: list[Any]) -> None:
    for rank in ranks:
        for error in rank["told"]["errors"]:
            assert "rank 1 differs from rank 0 in rows of their own" in error
            assert "bool[2], float64[2, 7] and bool[2], float64[2, 8]" in error
            assert "pad them to one length on all ranks" in error
        assert len(rank["told"]["errors"]) == 2
        assert max(rank["told"]["after"].values()) < 1e-12


def test_accelerate_gets_its_own_rows_back() -> None:
    for rank in spawn("tests.runtime.rows_workers.accelerated", 2):
        assert isinstance(rank, dict) and max(rank.values()) < 1e-12


def test_outputs_are_as_long_as_what_a_rank_padded() -> None:
    """So that they go with its own labels and mask, in metrics as in a loss."""
    ranks: list[Any] = spawn("tests.runtime.rows_workers.padded_by_rank", 2)
    for rank, (seen, length) in enumerate(zip(ranks, (4, 6), strict=True)):
        assert seen["shape"] == [2, length, 11], rank
        assert seen["pooled"] == [2, 6]
        assert max(seen["logits"], seen["metrics"], seen["grad"]) < 1e-12


@pytest.mark.parametrize("size", [2, 3])
def test_losses_outside_of_own_rows_are_those_of_ddp(size: int) -> None:
    for rank in spawn("tests.runtime.rows_workers.outside", size):
        assert isinstance(rank, dict) and len(rank) == 7
        for name, off in rank.items():
            assert max(off.values()) < 1e-9, name
