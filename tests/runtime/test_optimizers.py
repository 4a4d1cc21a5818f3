"""Every optimizer of torch steps on shards, even and uneven, as on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost_model.optimizer_kinds import OPTIMIZERS
from autopar.runtime.module.optimizers import BY_TENSOR, ELEMENTWISE, TOGETHER, UNABLE
from tests.runtime.optimizer_workers import kinds
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.optimizer_workers.every_optimizer", 4)


def test_there_is_a_way_for_every_class_of_torch() -> None:
    assert set(kinds()) == ELEMENTWISE | BY_TENSOR | TOGETHER | UNABLE
    planned = {kind.__name__.lower() for kind in ELEMENTWISE | BY_TENSOR | TOGETHER}
    assert planned <= set(OPTIMIZERS)
    whole = {kind.__name__.lower() for kind in BY_TENSOR | TOGETHER}
    elsewhere = {"transformers-adafactor"}
    assert {name for name, known in OPTIMIZERS.items() if known.whole} == whole | elsewhere


def test_shards_end_where_whole_tensors_do(ranks: list[Any]) -> None:
    check(ranks)


@pytest.mark.nightly
def test_of_many_tensors_at_once_and_fused_too() -> None:
    check(spawn("tests.runtime.optimizer_workers.every_way", 4))


def check(ranks: list[Any]) -> None:
    for rank in ranks:
        unable = {name: seen for name, seen in rank.items() if isinstance(seen, str)}
        assert list(unable) == ["SparseAdam"]
        assert "SparseAdam needs sparse gradients" in unable["SparseAdam"]
        far = {name: seen for name, seen in rank.items() if name not in unable and seen > 1e-6}
        assert not far


def test_a_rank_holds_the_states_that_the_plan_says() -> None:
    """Rank 0 has the largest shard of what is uneven."""
    first, *_ = spawn("tests.runtime.optimizer_workers.kept_bytes", 2)
    assert isinstance(first, dict)
    assert not {name: both for name, both in first.items() if both[0] != both[1]}
