"""A script trains as ever while its model works in the stages of a pipeline, as eager does: what
processes do with parameters of which each has those of its stages, and what they are told of a
rank that is lost."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from tests.runtime.spawn import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TOLERANCE = 2e-5
TIME_LIMIT_S = 570.0


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return spawn("tests.runtime.stage_workers.two", 2)


@pytest.fixture(scope="module")
def two_more() -> list[Any]:
    return spawn("tests.runtime.stage_workers.two_more", 2, timeout_s=TIME_LIMIT_S)


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return spawn("tests.runtime.stage_plan_workers.four", 4)


@pytest.fixture(scope="module")
def four_more() -> list[Any]:
    return spawn("tests.runtime.stage_plan_workers.four_more", 4, timeout_s=TIME_LIMIT_S)


def test_ten_steps_of_a_script(two: list[Any]) -> None:
    for rank in two:
        seen = {name: value for name, value in rank["script"].items() if name != "told"}
        assert max(seen.values()) < TOLERANCE, seen
    (told,) = two[0]["script"]["told"]  # Rank 0 plans.
    assert "the gradient of output 1 comes from the script" in told


def test_a_backward_in_two_parts_trains_as_eager_does(two: list[Any]) -> None:
    check_training(two, "zero bubble")


@pytest.mark.nightly
def test_interleaved_stages_train_as_eager_does(two_more: list[Any]) -> None:
    check_training(two_more, "interleaved")


@pytest.mark.parametrize(
    "what", ["dropout", "any order", "checkpoints", "files", "random", "shared"]
)
def test_what_scripts_do(two: list[Any], what: str) -> None:
    for rank in two:
        assert rank[what] and max(rank[what].values()) < TOLERANCE, rank[what]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "what",
    [
        "checkpoints",
        "dropout in two parts",
        "two parts",
        "optimizers",
        "many at once",
        "frozen",
        "other calls",
    ],
)
def test_what_else_scripts_do(two_more: list[Any], what: str) -> None:
    for rank in two_more:
        assert rank[what] and max(rank[what].values()) < TOLERANCE, rank[what]


def test_stages_that_nobody_asked_for(two: list[Any]) -> None:
    """Where links are slow; not where ranks have rows of their own, as stages take inputs whole."""
    check_unasked(two, {"at once": [2, 2], "rows of its own": [1, 1]})


@pytest.mark.nightly
def test_stages_that_nobody_asked_for_after_evaluation(two_more: list[Any]) -> None:
    check_unasked(two_more, {"after evaluation": [2, 2]})


def check_unasked(ranks: list[Any], stages: dict[str, list[int]]) -> None:
    for rank in ranks:
        seen = rank["unasked"]
        assert {name: each.pop("stages") for name, each in seen.items()} == stages
        counts = {name: each.pop("microbatches") for name, each in seen.items()}
        staged = [name for name, found in stages.items() if found[0] > 1]
        assert min(count for name in staged for count in counts[name]) > 1, counts
        for each in seen.values():
            assert max(each.values()) < TOLERANCE, seen


def test_parameters_gradients_and_outputs_in_a_script(two: list[Any]) -> None:
    for rank in two:
        seen = rank["scripts"]
        assert seen.pop("not here") > 5
        assert max(seen.values()) < TOLERANCE, seen


def check_training(ranks: list[Any], case: str) -> None:
    for rank in ranks:
        seen = rank[case]
        assert max(seen[name] for name in ("loss", "grad", "norm", "param")) < TOLERANCE, seen
        assert seen["same objects"] and seen["same names"] and seen["tied"]


def test_four_stages(four: list[Any]) -> None:
    check_training(four, "llama")


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["llama by tensors", "gpt2", "unequal"])
def test_stages_in_shards_and_ranks_that_differ_in_their_meshes(
    four_more: list[Any], case: str
) -> None:
    check_training(four_more, case)
    assert all(rank[case]["sharded"] > 5 for rank in four_more)


@pytest.mark.nightly
def test_other_calls_of_ranks_that_differ_in_their_meshes(four_more: list[Any]) -> None:
    for rank in four_more:
        assert max(rank["other calls"].values()) < TOLERANCE, rank["other calls"]
    assert len(four_more[0]["other calls"]) == 5


def test_stages_that_make_again_and_offload_and_have_parameters_on_the_host(
    four: list[Any],
) -> None:
    for rank in four:
        assert len(rank["memory"]) == 1
        assert max(rank["memory"].values()) < 1e-6, rank["memory"]


@pytest.mark.nightly
def test_stages_that_do_so_without_microbatches(four_more: list[Any]) -> None:
    for rank in four_more:
        assert len(rank["memory"]) == 1
        assert max(rank["memory"].values()) < 1e-6, rank["memory"]


@pytest.mark.nightly
def test_stages_of_any_sizes_under_any_plans() -> None:
    for rank in spawn("tests.runtime.stage_plan_workers.any_stages", 4):
        found = cast("dict[str, float]", rank)
        assert len(found) == 8
        assert max(found.values()) < 1e-6, found


WAITED = (
    r"RankError: rank 0 waited in the backward of microbatch {} in stage 0 of call 2, for \S+ of "
    r"stage 1 from rank 1, and rank 1 "
)
HERE = r"stage_failure_workers\.py:\d+ in "


@pytest.mark.parametrize(
    ("case", "microbatch", "told"),
    [
        pytest.param(
            "killed",
            "[01]",  # What it has sent before may be lost with it.
            r"\(process \d+ on \S+\) has ended without a word, as a process that is killed does",
            marks=pytest.mark.nightly,
        ),
        ("raising", "1", rf"has ended with ValueError: no such file \(at {HERE}fail\)"),
        pytest.param("asleep", "1", rf"is at {HERE}<lambda>", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_lost_is_named_with_its_stage(case: str, microbatch: str, told: str) -> None:
    found = spawn(f"tests.runtime.stage_failure_workers.{case}", 2, timeout_s=60, lost=(1,))[0]
    assert re.fullmatch(WAITED.format(microbatch) + told, cast("str", found))
