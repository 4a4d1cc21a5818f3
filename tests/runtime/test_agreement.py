"""The agreement of ranks, as threads on one Store."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from autopar.errors import AutoparError, InfeasibleError, PlanMismatchError, RankError
from autopar.runtime.process import agreement
from autopar.runtime.process.agreement import Agreement
from autopar.runtime.process.rank_registry import RankLocation, RankRegistry, StoreKeeper
from autopar.runtime.process.waits import BoundedStore

Work = Callable[[Agreement, int], object]
HERE = r"test_agreement\.py:\d+"


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
    ranks = [rank for rank in range(world_size) if rank not in absent]
    stores = {rank: clients() for rank in ranks}
    rolls = {rank: roll_of(clients(), rank, world_size) for rank in ranks}

    def run(rank: int) -> None:
        end = Agreement(BoundedStore(stores[rank], timeout_s), rolls[rank], name="test")
        try:
            outcomes[rank] = work(end, rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for roll in rolls.values():
        roll.close()
    return outcomes


def roll_of(store: dist.Store, rank: int, size: int) -> RankRegistry:
    own = BoundedStore(dist.PrefixStore("roll", store), 10.0)
    return RankRegistry(own, rank, size, keeper=StoreKeeper(""))


class Counted(dist.Store):
    """A Store that counts what it is asked, of all its clients together."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.asked: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.asked["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked["get"] += 1
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        self.asked["add"] += 1
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.asked["check"] += 1
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked["multi_get"] += 1
        return self._store.multi_get(keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.asked["compare_set"] += 1
        return self._store.compare_set(key, expected, value)


def asked_in(world_size: int, work: Work, patch: pytest.MonkeyPatch) -> tuple[list[object], Any]:
    """What ranks end with, and how often the Store of their agreement was asked for what, when
    none has to look who is missing."""
    patch.setattr(agreement, "LOOK_S", 30.0)
    store = dist.HashStore()
    counted = Counted(store)
    sources = itertools.cycle([counted] * world_size + [store] * world_size)
    outcomes = meet(lambda: next(sources), world_size, work, timeout_s=30.0)
    return outcomes, counted.asked


def agree_on(*values: str) -> Work:
    return lambda end, rank: end.agree("the plan", {"plan": values[rank], "torch": "2"})


def test_equal_facts_pass(clients: Callable[[], dist.Store]) -> None:
    assert meet(clients, 8, agree_on(*"aaaaaaaa")) == [None] * 8


@pytest.mark.parametrize("world_size", [2, 64])
def test_each_rank_asks_the_store_a_few_things(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its facts, its number, the verdict: no rank but the last reads those of all."""
    outcomes, asked = asked_in(world_size, agree_on(*"a" * world_size), monkeypatch)
    assert outcomes == [None] * world_size
    del asked["check"]  # As often as one rank is later than another.
    assert asked == {
        "set": world_size, "add": world_size, "get": world_size - 1,
        "multi_get": 1, "compare_set": 1,
    }  # fmt: skip


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
    outcomes = meet(clients, 4, agree_on(*"aaaa"), absent=(1, 3), timeout_s=0.5)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankError)
        assert re.fullmatch(
            r"ranks 1, 3 did not come to agree on the plan within 0\.5 s: rank 1 has made no "
            r"compiled model yet, rank 3 has made no compiled model yet \(who has come waits at "
            rf"{HERE} in <lambda>\); every rank must run the same script and make the same calls",
            str(outcomes[rank]),
        )


def test_one_rank_looks_for_all_who_is_missing(
    clients: Callable[[], dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "LOOK_S", 0.1)
    looked: list[int] = []
    call = RankRegistry.call

    def counted(roll: RankRegistry) -> list[RankLocation]:
        looked.append(roll.rank)
        return call(roll)

    monkeypatch.setattr(RankRegistry, "call", counted)
    outcomes = meet(clients, 6, agree_on(*"aaaaaa"), absent=(5,), timeout_s=1.0)
    assert all("rank 5 did not come" in str(outcome) for outcome in outcomes[:5])
    assert len(set(looked)) == 1


def test_a_rank_at_work_is_waited_for(
    clients: Callable[[], dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times as long as the timeout: rank 0 in what it is to share, rank 1 before it
    agrees."""
    rolls: dict[int, RankRegistry] = {}
    init = RankRegistry.__init__

    def kept(roll: RankRegistry, store: BoundedStore, rank: int, *args: Any, **kwargs: Any) -> None:
        init(roll, store, rank, *args, **kwargs)
        rolls[rank] = roll

    monkeypatch.setattr(RankRegistry, "__init__", kept)
    monkeypatch.setattr(agreement, "LOOK_S", 0.2)
    done = threading.Event()

    def make() -> bytes:
        done.wait(1.6)
        return b"a plan"

    def work(end: Agreement, rank: int) -> object:
        if rank == 1:
            with rolls[rank].working():
                done.wait(1.6)
        end.agree("the trace", {})
        return end.share("plan", make)

    assert meet(clients, 2, work, timeout_s=0.8) == [b"a plan"] * 2


def test_a_rank_that_has_ended_is_waited_for_no_longer(
    clients: Callable[[], dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the timeout is far away."""
    monkeypatch.setattr(agreement, "LOOK_S", 0.1)
    ended = clients()
    roll_of(ended, 2, 3).close()
    outcomes = meet(clients, 3, agree_on(*"aaa"), absent=(2,), timeout_s=1000.0)
    for rank in (0, 1):
        assert isinstance(outcomes[rank], RankError)
        assert re.fullmatch(
            r"rank 2 cannot come to agree on the plan: rank 2 has ended after 0 calls \(who has "
            rf"come waits at {HERE} in <lambda>\)",
            str(outcomes[rank]),
        )
    outcomes = meet(
        clients, 3, lambda end, rank: end.share("plan", bytes), absent=(0, 2), timeout_s=0.2
    )
    assert "rank 0 cannot come to send the plan: rank 0 has ended" in str(outcomes[1])


def test_a_late_rank_reads_the_verdict_on_it(clients: Callable[[], dist.Store]) -> None:
    def work(end: Agreement, rank: int) -> None:
        if rank == 2:
            time.sleep(1.0)
        agree_on(*"aaa")(end, rank)

    outcomes = meet(clients, 3, work, timeout_s=0.3)
    assert len({str(o) for o in outcomes}) == 1
    assert all(isinstance(o, RankError) and "rank 2 did not" in str(o) for o in outcomes)


def test_a_failing_rank_stops_the_others_at_once(clients: Callable[[], dist.Store]) -> None:
    def work(end: Agreement, rank: int) -> None:
        if rank == 1:
            end.fail("the plan", ValueError("broken"))
            return
        agree_on(*"aaaa")(end, rank)

    # A timeout that nobody waits for: that of the test ends before.
    outcomes = meet(clients, 4, work, absent=(3,), timeout_s=1000.0)
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
    assert isinstance(outcomes[1], RankError)
    assert "rank 0 did not come to send the plan within 0.2 s: rank 0 has" in str(outcomes[1])


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


def test_many_ranks_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One reads the facts of all, whatever they are."""
    values = ["a"] * 256
    values[255] = "b"
    outcomes, asked = asked_in(256, agree_on(*values), monkeypatch)
    assert all("rank 255 differs from ranks 0, 1, 2" in str(outcome) for outcome in outcomes)
    assert all("and 247 more" in str(outcome) for outcome in outcomes)
    assert (asked["multi_get"], asked["compare_set"]) == (1, 1)


class Silent(dist.Store):
    """A Store whose keeper stands still from the `count`-th question on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._store, self._left = dist.HashStore(), count

    def _ask(self, name: str, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            threading.Event().wait()
        return getattr(self._store, name)(*args)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask("multi_get", keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._ask("compare_set", key, expected, value)


@pytest.mark.parametrize(
    ("what", "questions"),
    [
        *(("agree", count) for count in range(6)),
        *(("send", count) for count in range(2)),
        *(("receive", count) for count in range(4)),
    ],
)
def test_a_store_that_is_silent_is_not_waited_for_without_end(
    questions: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was asked last, of one rank that has come and one that has not."""
    monkeypatch.setattr(agreement, "LOOK_S", 0.05)
    monkeypatch.setattr(agreement, "_GRACE_S", 0.3)
    monkeypatch.setattr(agreement, "_LATER_S", 0.1)
    rank = int(what == "receive")
    roll = roll_of(dist.HashStore(), rank, 2)
    end = Agreement(BoundedStore(Silent(questions), 0.3), roll, name="test")
    with pytest.raises(RankError) as caught:
        if what == "agree":
            end.agree("the plan", {})
        else:
            end.share("plan", lambda: b"a plan")
    assert re.match(
        rf"rank {rank} waited for .* the plan, at {HERE} in test_\w+, and "
        rf"rank {1 - rank} has made no compiled model yet",
        str(caught.value),
    )
    roll.close()
