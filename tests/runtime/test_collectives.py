"""Collectives in forward: what they would sum is there already. Those of all ranks are what they
are for one rank, and others are refused by line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.collective_workers import TAKEN
from tests.runtime.spawn import spawn


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    found = spawn("tests.runtime.collective_workers.talk", 2)
    assert len(found) == 2
    return found


@pytest.mark.parametrize(
    ("talk", "call"),
    [
        ("out_of_place", "_c10d_functional.all_reduce.default talks to other ranks"),
        ("of_some", "torch.distributed.all_reduce talks to some of the ranks"),
        ("from_another", "torch.distributed.broadcast names another rank than 0"),
        ("to_another", "torch.distributed.send talks to other ranks"),
    ],
)
def test_a_collective_in_forward_is_refused_by_line(ranks: list[Any], talk: str, call: str) -> None:
    for rank in ranks:
        first, remedy = rank["told"][talk].split("\n")
        assert "collective_workers.py:" in first
        assert first.endswith(f": {call}")
        assert "leave" in remedy and "torch.compiler.is_compiling()" in remedy


def test_a_forward_sees_one_rank_whose_batch_is_that_of_all(ranks: list[Any]) -> None:
    for rank in ranks:
        assert set(rank["taken"]) == {each.__name__ for each in TAKEN}
        assert max(rank["taken"].values()) < 1e-12, rank["taken"]


def test_without_it_the_model_is_that_of_one_process(ranks: list[Any]) -> None:
    assert all(rank["guarded"] < 1e-12 for rank in ranks)


def test_a_norm_over_all_ranks_is_one_over_the_batch(ranks: list[Any]) -> None:
    assert all(rank["normed"] < 1e-12 for rank in ranks)
