"""Parameters without elements, ranks without any of a parameter, fewer rows than ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


def test_reductions_of_what_some_ranks_have_nothing_of() -> None:
    for seen in spawn("tests.runtime.empty_workers.uneven", 4):
        assert isinstance(seen, dict) and len(seen) > 50
        assert {name: off for name, off in seen.items() if not off < 1e-12} == {}


def test_parameters_without_elements_train() -> None:
    for seen in spawn("tests.runtime.empty_workers.without_elements", 2):
        assert isinstance(seen, dict)
        assert {name: off for name, off in seen.items() if not off < 1e-12} == {}


def test_a_first_batch_that_does_not_divide_is_stored_as_the_strategy_says() -> None:
    ranks: list[Any] = spawn("tests.runtime.empty_workers.odd_batches", 2)
    for each in ranks:
        for case, found in each["seen"].items():
            assert found["off"] < 1e-12, case
            assert found["sharded"] == case.startswith("fsdp")
            assert len(found["told"]) == (each["rank"] == 0)
