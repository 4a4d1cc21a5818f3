"""Two processes train as they are asked to; where a batch cannot be shared so, they say it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.strategy_workers.two", 2)


@pytest.mark.processes
def test_a_strategy_and_a_pin_are_kept_to(ranks: list[Any]) -> None:
    for seen in ranks:
        assert seen["losses"] < TOLERANCE and seen["params"] < TOLERANCE
        assert seen["sharded"]
        assert seen["logits"][:2] == ["S(1)"] * 2


@pytest.mark.processes
def test_a_batch_that_cannot_be_shared_is_planned_otherwise_and_said(ranks: list[Any]) -> None:
    (told,) = ranks[0]["told"]
    assert "3 samples do not divide by 2" in told
    assert not ranks[1]["told"]


@pytest.mark.processes
def test_torch_compile_takes_what_leaves_parameters_whole(ranks: list[Any]) -> None:
    for seen in ranks:
        assert seen["dynamo"]["loss"] < TOLERANCE
        assert "cannot do strategy fsdp: parameters stay" in seen["dynamo"]["told"]
