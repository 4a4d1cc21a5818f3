"""Where each rank is, for errors of ranks that wait for others.

Nothing is sent while all goes well. A thread of each rank, with its own connection to the Store,
checks a few times a second whether a rank asks. It answers with the line of its main thread. A rank
that ends posts that, and its error. A rank at work for others, such as on a plan, increments a
counter meanwhile, which distinguishes it from a lost one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec
from torch import fx
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from autopar.errors import RankError
from autopar.runtime.process.hosts import RankHost, process_state, this_host
from autopar.runtime.process.stack_lines import (
    in_optimizer,
    of_error,
    of_stack,
    script_line,
    waiting_collective,
)
from autopar.runtime.process.waits import BoundedStore, SilenceError
from autopar.runtime.torch_private import port_of

PERIOD_S = 0.25
ANSWER_S = 2.0
_LINGER_S = 2.5
_CLOSED = 1 << 40
_SHOWN = 4


class RankLocation(msgspec.Struct, frozen=True):
    """Where rank `rank` is: its number of calls of compiled models, its phase of a call ("forward",
    or empty), its line of the script, and the collective it waits in. `ended` says why it ended,
    and `because_of_others` that it did since others had. For a rank that does not answer, `who`
    describes it, and `seen` is what this machine shows of it."""

    rank: int
    number: int = 0
    calls: int = 0
    phase: str = ""
    line: str = ""
    waits_in: str = ""
    ended: str = ""
    because_of_others: bool = False
    who: str = ""
    seen: str = ""

    def __str__(self) -> str:
        name = self.who or f"rank {self.rank}"
        if self.ended:
            return f"{name} {self.ended}"
        if not self.number:
            return f"{name} {self.seen or _SILENT}"
        call = f" of call {self.calls}" if self.calls else ""
        during = f", in the {self.phase}{call}," if self.phase else ""
        if self.waits_in:
            at = f" (at {self.line})" if self.line else ""
            return f"{name}{during} waits in {self.waits_in}{at}"
        return f"{name}{during} is at {self.line or 'a place that cannot be told'}"


class RankRegistry:
    """One rank's end of the registry; `store` is a connection of its own to the Store of
    `keeper`."""

    def __init__(self, store: BoundedStore, rank: int, size: int, *, keeper: StoreKeeper) -> None:
        self.calls = 0
        self.phase = ""
        self.hosts: Sequence[RankHost] = ()
        """Of all ranks, once they are known."""
        self._gm: fx.GraphModule | None = None
        self._waits_in = ""
        self._works = 0
        self._here: set[int] = set()
        """The ranks known to have joined the registry."""
        self._store, self.rank, self.size = store, rank, size
        self._keeper = keeper
        self._keys = [f"place/{other}" for other in range(size)]
        self._thread_id = threading.get_ident()
        self._closing = threading.Event()
        store.set(f"host/{rank}", msgspec.json.encode(this_host(rank)).decode())
        self._post(RankLocation(rank))
        self._thread = threading.Thread(target=self._answer, name="autopar roll", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @contextmanager
    def during(
        self, phase: str, gm: fx.GraphModule | None = None, waits_in: str = ""
    ) -> Generator[None]:
        """Inside, this rank is in `phase` of the call, and runs `gm`, or waits in `waits_in`, which
        is no collective."""
        before = self.phase, self._gm, self._waits_in
        self.phase, self._gm, self._waits_in = phase, gm, waits_in
        self._thread_id = threading.get_ident()
        try:
            yield
        finally:
            self.phase, self._gm, self._waits_in = before

    @contextmanager
    def working(self) -> Generator[None]:
        """Inside, this rank works while others wait, unless it waits itself."""
        self._works += 1
        self._thread_id = threading.get_ident()
        try:
            yield
        finally:
            self._works -= 1

    def work_done(self, timeout_s: float) -> int:
        """A number that grows as long as any rank is at work. SilenceError from the Store."""
        return self._store.add("work", 0, timeout_s)

    def all_hosts(self) -> list[RankHost]:
        """The hosts of all ranks, which have all joined."""
        raw = self._store.multi_get([f"host/{rank}" for rank in range(self.size)])
        return [msgspec.json.decode(item, type=RankHost) for item in raw]

    def call(self) -> list[RankLocation]:
        """Where the other ranks are, by rank. If the Store is silent or gone, where its keeper is,
        alone."""
        try:
            number = self._store.add("called", 1, ANSWER_S)
            self._post(self.here(number))
            deadline = time.monotonic() + ANSWER_S
            while True:
                places = self._places()
                silent = [p for p in places if p.number < number and not p.ended]
                if not any(map(self._may_answer, silent)) or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        except SilenceError:
            return [self._keeper_place(is_gone=False)]
        except RuntimeError:
            return [self._keeper_place(is_gone=True)]
        answered = [
            p if p.ended or p.number >= number else self._unanswered(p.rank) for p in places
        ]
        return [p for p in answered if p.rank != self.rank]

    def _may_answer(self, place: RankLocation) -> bool:
        known = self.hosts[place.rank] if self.hosts else None
        return place.rank in self._here and not (known and process_state(known))

    def _unanswered(self, rank: int) -> RankLocation:
        """A rank that does not answer, with what can be seen of its process from here."""
        if not self.hosts:
            seen = "" if rank in self._here else "has made no compiled model yet"
            return RankLocation(rank, seen=seen)
        who, state = str(self.hosts[rank]), process_state(self.hosts[rank])
        if state == "gone":
            return RankLocation(rank, who=who, ended=_GONE)
        return RankLocation(rank, who=who, seen=_STOPPED if state == "stopped" else "")

    def _keeper_place(self, *, is_gone: bool) -> RankLocation:
        """Whoever keeps the Store, which does not answer."""
        rank = self._keeper.rank
        place = RankLocation(-1) if rank is None else self._unanswered(rank)
        name = place.who or self._keeper.name
        verb = "kept" if is_gone else "keeps"
        who = f"{name}, which {verb} {_STORE}," if name else _STORE
        ended = place.ended
        if is_gone:
            ended = f"{ended or 'has ended'}, and nobody can tell where the others are"
        return msgspec.structs.replace(place, who=who, ended=ended)

    def here(self, number: int) -> RankLocation:
        """Where this process is."""
        frames = of_stack(sys._current_frames().get(self._thread_id))
        line, waits_in = script_line(frames), self._waits_in
        waits_in = waits_in or waiting_collective(frames, self._gm)
        return RankLocation(self.rank, number, self.calls, self.phase, line, waits_in)

    def close(self) -> None:
        """Post that this process ends, and why; later calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        error: BaseException | None = getattr(sys, "last_value", None)
        with suppress(RuntimeError):
            self._explain(error)
            self._post(_farewell(self.rank, self.calls, error))
            if self._keeper.rank == self.rank:
                # Ranks that wait for others still ask this process. The rest must stop asking,
                # since torch prints pages about a Store that is gone.
                if error is not None:
                    self._linger()
                self._store.add("called", _CLOSED)
                time.sleep(PERIOD_S)

    def _explain(self, error: BaseException | None) -> None:
        """Print why a collective failed that is not the compiled model's own."""
        if error is None or not is_lost_peer(error):
            return
        frames = of_error(error)
        waited = waiting_collective(frames) or "a collective"
        phase = " of the optimizer" if in_optimizer(frames) else ""
        reason = guilty(self.call())
        line = script_line(frames)
        sys.stderr.write(
            f"autopar: rank {self.rank} waited in {waited}{phase} after call {self.calls}, at "
            f"{line}, and {reason}\n"
        )

    def _linger(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline and not all(p.ended for p in self._places()):
            time.sleep(0.05)

    def _places(self) -> list[RankLocation]:
        for rank in range(self.size):
            if rank not in self._here and self._store.check([self._keys[rank]], ANSWER_S):
                self._here.add(rank)
        raw = self._store.multi_get([self._keys[rank] for rank in sorted(self._here)], ANSWER_S)
        by_rank = {p.rank: p for p in (msgspec.json.decode(r, type=RankLocation) for r in raw)}
        return [by_rank.get(rank, RankLocation(rank)) for rank in range(self.size)]

    def _post(self, place: RankLocation) -> None:
        self._store.set(self._keys[self.rank], msgspec.json.encode(place).decode(), ANSWER_S)

    def _answer(self) -> None:
        answered = 0
        while not self._closing.wait(PERIOD_S):
            try:
                called = self._store.add("called", 0, ANSWER_S)
                if called >= _CLOSED:
                    return
                if called > answered:
                    self._post(self.here(called))
                    answered = called
                if self._works and not self.here(called).waits_in:
                    self._store.add("work", 1, ANSWER_S)
            except SilenceError:
                continue  # Its keeper may go on.
            except RuntimeError:
                return  # The Store is gone, and nobody can ask.


def guilty(places: Sequence[RankLocation]) -> str:
    """The ranks that cause the wait, and where they are, as text."""
    signs: tuple[Callable[[RankLocation], bool], ...] = (
        lambda p: not p.because_of_others and (bool(p.ended) or not p.number),
        lambda p: bool(p.ended),
        lambda p: not p.waits_in,
        lambda _: True,
    )
    suspects = next(filter(None, ([p for p in places if sign(p)] for sign in signs)))
    more = f", as are {len(suspects) - _SHOWN} more" if len(suspects) > _SHOWN else ""
    return ", ".join(map(str, suspects[:_SHOWN])) + more


def _farewell(rank: int, calls: int, error: BaseException | None) -> RankLocation:
    if error is None:
        return RankLocation(rank, calls=calls, ended=f"has ended after {calls} calls")
    text = next(iter(str(error).splitlines()), "")
    line = script_line(of_error(error))
    followed = isinstance(error, RankError) or is_lost_peer(error)
    if isinstance(error, RankError):
        text = text.removeprefix(f"rank {rank} ").partition(";")[0]
    ended = f"has ended with {type(error).__name__}: {text}" + (f" (at {line})" if line else "")
    return RankLocation(rank, calls=calls, ended=ended, because_of_others=followed)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that a peer is gone, or did not come in time."""
    if isinstance(error, SilenceError | DistNetworkError | DistStoreError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
)
_STORE = "the Store over which ranks find each other"
_SILENT = "does not answer: it was killed or stopped, or cannot be reached"
_GONE = "has ended without a word, as a process that is killed does"
_STOPPED = "is stopped, by a signal or a debugger"


class StoreKeeper(NamedTuple):
    """Who keeps the Store: rank 0, a process beside the ranks, or nobody, if it is a file."""

    name: str
    rank: int | None = None


def keeper_of(store: Store) -> StoreKeeper:
    """Who keeps `store`, by torch's rendezvous."""
    port = port_of(store)
    if port is None:
        return StoreKeeper("")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if by_agent and str(port) == os.environ.get("MASTER_PORT"):
        return StoreKeeper("torchrun")
    return StoreKeeper("rank 0", 0)
