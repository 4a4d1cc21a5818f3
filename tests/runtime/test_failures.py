"""Ranks that part: every other one is told which, where and in what, and none hangs."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from tests.runtime.spawn import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

HERE = r"failure_workers\.py:\d+ in "


@pytest.fixture(scope="module")
def together() -> list[Any]:
    return spawn("tests.runtime.failure_workers.together", 2, timeout_s=100)


@pytest.mark.parametrize(
    ("case", "differs"),
    [
        ("batch", r"batch \(all ranks must be handed the same global one\): -?\d+ and -?\d+"),
        ("order", r"batch \(all ranks must be handed the same global one\): -?\d+ and -?\d+"),
        (
            "shape",
            r".*inputs: float32\[4, 16\], .* and float32\[8, 16\], .*program: a new one and 0",
        ),
        ("gradients", r"gradients: off and on"),
        ("mode", r".*program: a new one and 0"),
        ("model", r".*program: a new one and 0"),
    ],
)
def test_every_rank_is_told_what_differs(together: list[Any], case: str, differs: str) -> None:
    said = {rank[case][0] for rank in together}
    assert len(said) == 1
    assert re.match(
        r"PlanMismatchError: the ranks do not agree on call \d+ of a compiled model: rank 1 "
        rf"differs from rank 0 in {differs}.*; every rank calls a compiled model at the same time",
        said.pop(),
    )


def test_ranks_go_on_after_that_and_may_be_late(together: list[Any]) -> None:
    assert [rank["late"][0] for rank in together] == ["no error"] * 2


def rank_0(case: str, lost: tuple[int, ...] = (1,)) -> tuple[str, str]:
    """What rank 0 is told where rank 1 parts from it, and the error under it."""
    text, cause = cast(
        "tuple[str, str]",
        spawn(f"tests.runtime.failure_workers.{case}", 2, timeout_s=60, lost=lost)[0],
    )
    assert "\n" not in text
    return text, cause


def test_a_rank_that_calls_alone_is_told_what_to_write() -> None:
    text, _ = rank_0("alone", ())
    assert re.fullmatch(
        rf"RankError: rank 0 waited in the start of call 2, at {HERE}.*, and rank 1 waits in "
        rf"barrier \(at {HERE}alone\); every rank calls .*: make the call on all ranks, or enter "
        r"`with model\.unsharded\(rank=0\):` on all ranks and make it inside on that one alone",
        text,
    )


WAITED = (
    r"RankError: rank 0 waited in the backward of call 2, in all_gather over mesh axis dp of what "
    r"\w+ made, and rank 1 "
)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("case", "told", "cause"),
    [
        ("killed", r"\(process \d+ on [^)]+\) was killed: its process is gone", "Connection"),
        ("raising", rf"has ended with ValueError: no such file \(at {HERE}fail\)", "Connection"),
        ("asleep", rf"is at {HERE}<lambda>", "Timed out waiting"),
    ],
)
def test_a_rank_that_is_lost_within_a_step_is_named(case: str, told: str, cause: str) -> None:
    text, below = rank_0(case)
    assert re.fullmatch(WAITED + told, text)
    assert cause in below  # what gloo says is kept, under the error


@pytest.mark.nightly
def test_a_rank_that_leaves_a_backward_out_is_told_so() -> None:
    first, second = spawn("tests.runtime.failure_workers.skipping", 2, timeout_s=60)
    assert re.match(WAITED + "has ended|" + WAITED + f"is at {HERE}", cast("Any", first)[0])
    assert re.match(
        rf"RankError: rank 1 waited in the start of call 3, at {HERE}<lambda>, and rank 0, in the "
        r"backward of call 2, waits in all_gather over mesh axis dp of what \w+ made",
        cast("Any", second)[0],
    )
