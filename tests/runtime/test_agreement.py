"""The agreement of ranks, as threads on one Store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from autopar.errors import AutoparError, InfeasibleError, PlanMismatchError
from autopar.runtime.process import agreement
from autopar.runtime.process.agreement import Agreement

Work = Callable[[Agreement, int], object]


@pytest.fixture(params=["hash", "tcp"])
def clients(request: pytest.FixtureRequest) -> Iterator[Callable[[], dist.Store]]:
    """Makes a client of one shared Store."""
    if request.param == "hash":
        store: dist.Store = dist.HashStore()
        yield lambda: store
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
        yield server.clone


def meet(
    clients: Callable[[], dist.Store],
    world_size: int,
    work: Work,
    absent: tuple[int, ...] = (),
    timeout_s: float = 10.0,
) -> list[object]:
    """What `work` returns, or the error it raises, per rank; None for absent ranks."""
    outcomes: list[object] = [None] * world_size
    stores = [clients() for _ in range(world_size)]

    def run(rank: int) -> None:
        end = Agreement(
            stores[rank],
            rank,
            world_size,
            name="test",
            timeout_s=timeout_s,
            share_timeout_s=timeout_s,
        )
        try:
            outcomes[rank] = work(end, rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=run, args=(r,)) for r in range(world_size) if r not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def agree_on(*values: str) -> Work:
    return lambda end, rank: end.agree("the plan", {"plan": values[rank], "torch": "2"})


def test_equal_facts_pass(clients: Callable[[], dist.Store]) -> None:
    start = time.monotonic()
    assert meet(clients, 8, agree_on(*"aaaaaaaa")) == [None] * 8
    assert time.monotonic() - start < 5


def test_odd_ranks_are_named_on_every_rank(clients: Callable[[], dist.Store]) -> None:
    outcomes = meet(clients, 5, agree_on(*"aabac"))
    for outcome in outcomes:
        assert isinstance(outcome, PlanMismatchError)
        assert str(outcome) == (
            "the ranks do not agree on the plan: "
            "rank 2 differs from ranks 0, 1, 3 in plan: b and a; "
            "rank 4 differs from ranks 0, 1, 3 in plan: c and a"
        )


def test_a_fact_that_only_some_have_is_named(clients: Callable[[], dist.Store]) -> None:
    def work(end: Agreement, rank: int) -> None:
        end.agree("the plan", {"x": "1"} if rank else {})

    outcomes = meet(clients, 3, work)
    assert {str(o) for o in outcomes} == {
        "the ranks do not agree on the plan: rank 0 differs from ranks 1, 2 in x: nothing and 1"
    }


def test_missing_ranks_are_named(clients: Callable[[], dist.Store]) -> None:
    start = time.monotonic()
    outcomes = meet(clients, 4, agree_on(*"aaaa"), absent=(1, 3), timeout_s=0.5)
    assert time.monotonic() - start < 3
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PlanMismatchError)
        assert str(outcomes[rank]).startswith(
            "ranks 1, 3 did not come to agree on the plan within 0.5 s"
        )


def test_a_late_rank_reads_the_verdict_on_it(clients: Callable[[], dist.Store]) -> None:
    def work(end: Agreement, rank: int) -> None:
        if rank == 2:
            time.sleep(1.0)
        agree_on(*"aaa")(end, rank)

    outcomes = meet(clients, 3, work, timeout_s=0.3)
    assert len({str(o) for o in outcomes}) == 1
    assert all(isinstance(o, PlanMismatchError) and "rank 2 did not" in str(o) for o in outcomes)


def test_a_failing_rank_stops_the_others_at_once(clients: Callable[[], dist.Store]) -> None:
    def work(end: Agreement, rank: int) -> None:
        if rank == 1:
            end.fail("the plan", ValueError("broken"))
            return
        agree_on(*"aaaa")(end, rank)

    start = time.monotonic()
    outcomes = meet(clients, 4, work, absent=(3,))
    assert time.monotonic() - start < 5
    for rank in (0, 2):
        assert isinstance(outcomes[rank], AutoparError)
        assert str(outcomes[rank]) == "rank 1 failed: ValueError: broken"


def test_bytes_reach_every_rank_in_chunks(
    clients: Callable[[], dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "CHUNK_BYTES", 7)
    data = bytes(range(256)) * 3
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return data

    assert meet(clients, 4, lambda end, rank: end.share("plan", make)) == [data] * 4
    assert made == [1]


def test_no_bytes_are_bytes(clients: Callable[[], dist.Store]) -> None:
    assert meet(clients, 2, lambda end, rank: end.share("plan", bytes)) == [b"", b""]


def test_a_plan_that_fails_on_rank_0_fails_everywhere(clients: Callable[[], dist.Store]) -> None:
    def make() -> bytes:
        raise InfeasibleError("no room")

    outcomes = meet(clients, 3, lambda end, rank: end.share("plan", make))
    assert all(isinstance(outcome, InfeasibleError) for outcome in outcomes)
    assert [str(o) for o in outcomes] == [
        "no room",
        "rank 0 failed: no room",
        "rank 0 failed: no room",
    ]


def test_silence_of_rank_0_ends(clients: Callable[[], dist.Store]) -> None:
    outcomes = meet(
        clients, 2, lambda end, rank: end.share("plan", bytes), absent=(0,), timeout_s=0.2
    )
    assert isinstance(outcomes[1], PlanMismatchError)
    assert "rank 0 sent no plan within 0.2 s" in str(outcomes[1])


def test_damaged_bytes_are_refused(clients: Callable[[], dist.Store]) -> None:
    def work(end: Agreement, rank: int) -> object:
        if rank == 0:
            end.share("plan", lambda: b"a plan")
            clients().set("autopar/test/plan/chunk/0", b"a plot".hex())
            clients().set("damaged", "1")
            return None
        clients().wait(["damaged"])
        return end.share("plan", bytes)

    assert "damaged" in str(meet(clients, 2, work)[1])


def test_many_ranks_agree_quickly() -> None:
    store = dist.HashStore()
    values = ["a"] * 256
    values[255] = "b"
    start = time.monotonic()
    outcomes = meet(lambda: store, 256, agree_on(*values))
    assert time.monotonic() - start < 5
    assert all("rank 255 differs from ranks 0, 1, 2" in str(outcome) for outcome in outcomes)
    assert all("and 247 more" in str(outcome) for outcome in outcomes)
