"""Four real processes over gloo, started once: training equals one process, mistakes are told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.spawn import spawn

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5
TIME_LIMIT_S = 420


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return spawn("tests.runtime.breadth_workers.four", 4, timeout_s=TIME_LIMIT_S)


@pytest.fixture(scope="module")
def more_ranks() -> list[Any]:
    return spawn("tests.runtime.breadth_workers.four_more", 4, timeout_s=TIME_LIMIT_S)


@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize("case", ["gpt2", "random", "mixtral"])
def test_training_equals_one_process(ranks: list[Any], case: str) -> None:
    check_training(ranks, case)


def check_training(ranks: list[Any], case: str) -> None:
    for seen in (rank[case] for rank in ranks):
        assert seen["loss"] < TOLERANCE
        assert seen["grad"] < TOLERANCE
        assert seen["norm"] < TOLERANCE
        assert seen["param"] < TOLERANCE


@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize("case", ["gpt2", "random", "mixtral"])
def test_names_ties_and_identity_stay(ranks: list[Any], case: str) -> None:
    check_identity(ranks, case)


def check_identity(ranks: list[Any], case: str) -> None:
    for seen in (rank[case] for rank in ranks):
        assert seen["same objects"] and seen["same names"] and seen["tied"]


@pytest.mark.nightly
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_training_as_it_is_planned_on_two_axes(more_ranks: list[Any]) -> None:
    check_training(more_ranks, "llama")
    check_identity(more_ranks, "llama")


def test_parameters_are_sharded_over_one_and_two_axes(ranks: list[Any]) -> None:
    assert ranks[0]["gpt2"]["mesh"] == [4]
    assert ranks[0]["gpt2"]["sharded"] > 3
    assert ranks[0]["random"]["mesh"] == [2, 2]
    assert ranks[0]["random"]["sharded"] > 3


def test_other_batch_sizes_and_modes_make_programs_of_their_own(ranks: list[Any]) -> None:
    for rank in ranks:
        seen = rank["modes"]
        assert max(seen[name] for name in ("loss", "h", "grad", "eval")) < TOLERANCE
        assert seen["h is in shards"]
        assert seen["programs"] == 3
        assert seen["calls"] == 4.0
        assert seen["full state"]


def test_nested_pieces_are_those_of_dtensor(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["chunks"]["wrong"] == 0
        assert rank["chunks"]["uneven"] > 5


def test_dropout_is_that_of_rank_0_on_every_rank(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["dropout"]["losses"] == pytest.approx(
            rank["dropout"]["expected"], rel=TOLERANCE
        )


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("options", "rank 2 differs from ranks 0, 1, 3 in optimizer: sgd and adamw"),
        ("batch", "rank 2 differs from ranks 0, 1, 3 in batch (all ranks must be handed the same"),
        ("shape", "inputs: float32[4, 16], float32[4, 16] and float32[8, 16], float32[8, 16]"),
        (
            "arguments",
            "inputs: float32[8, 16] and float32[8, 16], float32[8, 16]",
        ),
        ("cluster", "cluster 8xcpu has 8 devices, but 4 processes run"),
        ("other model", "only the model has the parameters down.weight, up.bias, up.weight"),
    ],
)
def test_every_rank_is_told_what_does_not_match(ranks: list[Any], mistake: str, words: str) -> None:
    for rank in ranks:
        assert rank["mistakes"][mistake].startswith("PlanMismatchError: ")
        assert words in rank["mistakes"][mistake]


def test_a_rank_that_fails_stops_the_others_with_its_words(ranks: list[Any]) -> None:
    told = [rank["mistakes"]["one fails"] for rank in ranks]
    assert all(text.startswith("TraceError: ") for text in told)
    assert all("rank 2 failed: cannot capture" in told[r] for r in (0, 1, 3))


def test_a_plan_that_does_not_exist_is_an_error_everywhere(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["mistakes"]["memory"].startswith("InfeasibleError: ")
        assert "is missing. It holds parameters" in rank["mistakes"]["memory"]


def test_the_right_call_works_after_wrong_ones(ranks: list[Any]) -> None:
    assert {rank["mistakes"]["right after wrong"] for rank in ranks} == {"no error"}


def test_losses_gradients_and_buffers_are_those_of_one_process(ranks: list[Any]) -> None:
    check_buffers(ranks, "resnet")


@pytest.mark.nightly
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize("case", ["opt", "opt at random", "resnet at random"])
def test_other_models_and_plans_at_random(more_ranks: list[Any], case: str) -> None:
    check_buffers(more_ranks, case)


def check_buffers(ranks: list[Any], case: str) -> None:
    for seen in (rank[case] for rank in ranks):
        assert max(seen[name] for name in ("loss", "grad", "buffer", "eval")) < TOLERANCE
        assert seen["sharded"] > 3
        assert seen["buffers"] > 10 or "opt" in case


@pytest.mark.nightly
@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_calls_of_every_sort_accumulate_gradients(more_ranks: list[Any]) -> None:
    for seen in (rank["calls"] for rank in more_ranks):
        assert max(seen[name] for name in ("loss", "grad", "buffer", "hidden")) < TOLERANCE
        assert seen["rest"] == [8, True, None]
        assert seen["programs"] == 2
        assert seen["autocast"] < 2**-7
