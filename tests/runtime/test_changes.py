"""What a script does to parameters and gradients of several processes has the effect it has on one
device, to the numbers that are drawn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


_AT_NIGHT = [
    pytest.param(name, marks=pytest.mark.nightly)
    for name in ("in_shards", "replicated", "in_stages")
]


@pytest.fixture(scope="module", params=["few_in_shards", "few_in_stages", *_AT_NIGHT])
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    return spawn(f"tests.runtime.changes_workers.{request.param}", 2)


def test_changes_leave_what_they_leave_on_one_device(ranks: list[Any]) -> None:
    assert [rank["changes"] for rank in ranks] == [{}, {}]


def test_losses_of_parameters_have_the_gradients_of_one_device(ranks: list[Any]) -> None:
    assert [rank["losses"] for rank in ranks] == [{}, {}]


def test_a_change_between_forward_and_backward_is_an_error_or_has_no_effect(
    ranks: list[Any],
) -> None:
    assert all(rank.get("between", {}) == {} for rank in ranks)


def test_what_cannot_be_is_told(ranks: list[Any]) -> None:
    for told in (rank["told"] for rank in ranks if "told" in rank):
        assert "shape (3, 8) cannot take their place" in told["data"]
        assert "torch.float32 of shape (12, 8) cannot take their place" in told["grad"]
        assert "in the forward of the model" in told["rows"]


def test_a_penalty_beside_the_loss_of_own_rows_is_that_of_one_device(ranks: list[Any]) -> None:
    assert all(rank["of own rows"] < 1e-9 for rank in ranks if "told" in rank)
