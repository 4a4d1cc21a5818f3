"""Three real processes over gloo, where hardly any size divides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5
TIME_LIMIT_S = 300


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.uneven_workers.three", 3, timeout_s=TIME_LIMIT_S)


@pytest.fixture(scope="module")
def lean_ranks() -> list[Any]:
    return spawn("tests.runtime.uneven_workers.three_lean", 3, timeout_s=TIME_LIMIT_S)


@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_training_equals_one_process(ranks: list[Any]) -> None:
    check(ranks, "random")


@pytest.mark.nightly
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_training_in_little_memory_equals_one_process(lean_ranks: list[Any]) -> None:
    check(lean_ranks, "lean")


def check(ranks: list[Any], case: str) -> None:
    for seen in (rank[case] for rank in ranks):
        assert max(seen[name] for name in ("loss", "grad", "norm", "param")) < TOLERANCE
        assert seen["uneven"] > 2
        assert seen["same objects"] and seen["same names"] and seen["tied"]


def test_pieces_are_those_of_dtensor(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["chunks"]["wrong"] == 0
        assert rank["chunks"]["uneven"] > 3


@pytest.mark.nightly
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_another_batch_changes_no_storage(lean_ranks: list[Any]) -> None:
    for rank in lean_ranks:
        assert rank["shapes"]["loss"] < TOLERANCE
        assert rank["shapes"]["same"] and rank["shapes"]["grads"]
        assert rank["shapes"]["sharded"] > 3
