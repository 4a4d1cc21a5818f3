"""Outputs in shards behave like the tensors of one device, on two processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.output_workers.two", 2)


def test_metrics_and_their_gradients_are_those_of_one_device(ranks: list[Any]) -> None:
    assert [rank["wrong"] for rank in ranks] == [[], []]


def test_common_ops_put_nothing_together(ranks: list[Any]) -> None:
    assert [rank["gathered"] for rank in ranks] == [[], []]


def test_what_is_written_into_a_part_is_seen_in_the_whole(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["writes"]["seen"]


@pytest.mark.parametrize("how", ["shown", "asked for", "not used"])
def test_training_through_another_output_is_that_of_one_process(ranks: list[Any], how: str) -> None:
    kinds = {
        "shown": ["ShardedOutput", "Tensor", "Tensor"],
        "asked for": ["Tensor"] * 3,
        "not used": ["ShardedOutput"] * 3,
    }
    for seen in (rank[how] for rank in ranks):
        assert seen["metric"] == 0 and seen["param"] < 1e-5
        assert seen["calls"] == 3 and seen["programs"] == 1 and seen["in shards"]
        assert seen["kinds"] == kinds[how]


def test_what_every_rank_has_all_of_is_plain(ranks: list[Any]) -> None:
    assert all(rank["whole"] for rank in ranks)


def test_a_state_that_is_handed_back_is_what_it_is_on_one_device(ranks: list[Any]) -> None:
    """In one stage, in microbatches, and in stages, where one of the ranks has none of it."""
    for rank in ranks:
        assert max(rank["handed back"]) < 1e-5
