"""Ranks that part: every other one is told which, where and in what, and none hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.runtime.spawn import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

GONE = "has ended without a word, as a process that is killed does"
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
        ("killed", rf"\(process \d+ on [^)]+\) {GONE}", "Connection"),
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


PLAN = "rank 0 to send the plan|the others to agree on what to compile"
"""Rank 0 may be ahead."""

WAITS = {
    ("start", 0): "rank 1 waited for the Store, and ",
    ("start", 1): "rank 1 did not come to agree on the first compiled model within 6 s: ",
    ("planning", 0): rf"rank 1 waited for ({PLAN}), at {HERE}\w+, and ",
    ("planning", 1): "rank 1 (cannot|did not) come to agree on the plan( within 6 s)?: ",
    ("second_call", 0): rf"rank 1 waited in the start of call 2, at {HERE}script, and ",
    ("second_call", 1): rf"rank 0 waited in the start of call 2, at {HERE}script, and ",
    (
        "backward",
        0,
    ): r"rank 1 waited in the backward of call 2, in \w+ over mesh axis dp of .*, and ",
    (
        "backward",
        1,
    ): r"rank 0 waited in the backward of call 2, in \w+ over mesh axis dp of .*, and ",
    (
        "pipeline",
        0,
    ): r"rank 1 waited in the forward of microbatch \d in stage 1 of call 2, for .*, and ",
    ("pipeline", 1): r"rank 0 waited in the \w+ of \w+.* of call 2, for .*, and ",
}
"""By when which rank is lost, what the other is told that it waited for."""
STATES = {
    "killed": GONE,
    "gone": GONE,
    "stopped": "is stopped, by a signal or a debugger",
    "ended": "has ended",
}


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of ranks that meet over a Store of rank 0, of an agent as torchrun's, or in a
    file."""
    if kind == "agent":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        by_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        yield {"STORE_URL": "env://"} | by_agent
    else:
        yield {"STORE_URL": "env://" if kind == "rank 0" else f"file://{folder}/store"}


def check_told(how: str, when: str, lost: int, kept_by: str, folder: Path) -> None:
    """The other rank ends, with an error that says who is lost and what it waited for."""
    with store_of(kept_by, folder) as env:
        function, env = "tests.runtime.failure_workers.lost", env | {"LOST": f"{how} {when} {lost}"}
        told = spawn(function, 2, timeout_s=150, lost=(lost,), env=env)[1 - lost]
    text, _ = cast("list[str]", told)
    if when == "start":
        end = "has made no compiled model yet" if lost or kept_by != "rank 0" else "does not answer"
        waits = WAITS[when, lost if kept_by == "rank 0" else 1].replace(
            "rank 1 did", f"rank {lost} did"
        )
        assert re.match(rf"RankError: {waits}rank {lost} {end}", text)
        return
    kept = ", which (keeps|kept) the Store over which ranks find each other," * (not lost)
    kept = f"({kept})?" if kept else ""
    name = rf"rank {lost}( \(process \d+ on \S+\))?{kept}"
    waits = WAITS[when, lost]
    if (when, lost) == ("planning", 0) and kept_by != "rank 0":
        waits = "rank 0 (cannot|did not) come to send the plan( within 6 s)?: "
    assert re.match(rf"RankError: {waits}{name} {STATES[how]}", text)


def test_a_store_that_is_stopped_holds_up_nobody(tmp_path: Path) -> None:
    check_told("stopped", "second_call", 0, "rank 0", tmp_path)


def test_a_rank_that_is_killed_while_another_plans_is_named(tmp_path: Path) -> None:
    check_told("killed", "planning", 1, "rank 0", tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("when", ["start", "planning", "second_call", "backward", "pipeline"])
@pytest.mark.parametrize("how", ["killed", "stopped", "gone"])
def test_a_rank_that_is_lost_anywhere_is_named(
    how: str, when: str, lost: int, tmp_path: Path
) -> None:
    check_told(how, when, lost, "rank 0", tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("when", ["start", "planning", "second_call"])
@pytest.mark.parametrize("kept_by", ["agent", "file"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_is_named_over_any_store(
    how: str, kept_by: str, when: str, lost: int, tmp_path: Path
) -> None:
    check_told(how, when, lost, kept_by, tmp_path)
