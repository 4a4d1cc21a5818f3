"""Random numbers that scripts draw beside a compiled model, and what else is theirs alone: on
several ranks with the whole batch each, those of one process, or an error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.seed_workers import KINDS
from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_a_script_draws_is_what_one_process_does(num_ranks: int) -> None:
    for rank in spawn("tests.runtime.seed_workers.draws", num_ranks):
        assert isinstance(rank, dict)
        for found in rank.values():
            assert found.pop("what is drawn next") == 0
            assert max(found.values()) < 1e-6


@pytest.mark.parametrize("way", ["seeds_between_calls", "rank_0_alone", "another_alone"])
def test_seeds_and_draws_between_calls_are_those_of_one_process(way: str) -> None:
    for found in spawn(f"tests.runtime.seed_workers.{way}", 2):
        assert isinstance(found, dict)
        assert found.pop("what is drawn next") == 0
        assert max(found.values()) < 1e-6


def test_ranks_seeded_apart_before_they_compile_draw_rank_0s_numbers() -> None:
    first, second = spawn("tests.runtime.seed_workers.seeded_apart_before", 2)
    assert first == second


def test_what_differs_between_ranks_is_told_before_it_changes_parameters() -> None:
    ranks: list[Any] = spawn("tests.runtime.seed_workers.differing", 2)
    for rank in ranks:
        for in_shards in (False, True):
            for kind in KINDS:
                if in_shards and kind == "number within":
                    continue  # in the test below
                step, *said = rank[f"{in_shards} {kind}"]
                assert said, f"{kind} is not told, in shards: {in_shards}"
                assert "rank 1 differs from rank 0" in said[0]
                # Of a seed it is told at the call after.
                assert int(step) == (0 if in_shards else 2) + (kind == "seed")


def test_ranks_that_make_other_things_of_shards_each_are_told() -> None:
    for said in spawn("tests.runtime.seed_workers.number_within", 2):
        assert "Error: " in str(said)
