"""Where each rank is, for when one waits for others in vain.

Nothing is sent while all goes well: a thread of each rank looks a few times a second whether the
roll is called, over a connection to the Store that is its own, and answers with the line its main
thread is at. A rank that ends leaves word of it, and of the error it ended with.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

import msgspec
from torch import fx
from torch.distributed.distributed_c10d import Store

from autopar.errors import RankError
from autopar.runtime.process.spots import (
    in_optimizer,
    of_error,
    of_stack,
    script_line,
    waiting_collective,
)

PERIOD_S = 0.25
ANSWER_S = 2.0
_LINGER_S = 2.5
_CLOSED = 1 << 40
_SHOWN = 4


class RollPlace(msgspec.Struct, frozen=True):
    """Where rank `rank` is: how many calls of compiled models it has made, what of a call it is in
    ("forward", or nothing), its line of the script, and the collective it waits in. `ended` says
    why it ended; it did `because_of` others if that was because they did."""

    rank: int
    roll: int = 0
    calls: int = 0
    phase: str = ""
    line: str = ""
    waits_in: str = ""
    ended: str = ""
    because_of_others: bool = False

    def __str__(self) -> str:
        if self.ended:
            return f"rank {self.rank} {self.ended}"
        if not self.roll:
            return f"rank {self.rank} does not answer: it was killed, or cannot be reached"
        during = f", in the {self.phase} of call {self.calls}," if self.phase else ""
        if self.waits_in:
            at = f" (at {self.line})" if self.line else ""
            return f"rank {self.rank}{during} waits in {self.waits_in}{at}"
        return f"rank {self.rank}{during} is at {self.line or 'a place that cannot be told'}"


class Roll:
    """One rank's part in calling the roll; `store` is a connection of its own."""

    def __init__(self, store: Store, rank: int, size: int, *, keeps_store: bool) -> None:
        self.calls = 0
        self.phase = ""
        self._gm: fx.GraphModule | None = None
        self._waits_in = ""
        self._store, self._rank, self._size = store, rank, size
        self._keeps_store = keeps_store
        self._keys = [f"place/{other}" for other in range(size)]
        self._thread_id = threading.get_ident()
        self._closing = threading.Event()
        store.set(self._keys[rank], msgspec.json.encode(RollPlace(rank)).decode())
        self._thread = threading.Thread(target=self._answer, name="autopar roll", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @contextmanager
    def during(
        self, phase: str, gm: fx.GraphModule | None = None, waits_in: str = ""
    ) -> Generator[None]:
        """Inside, this rank is in `phase` of the call, and runs `gm`, or waits in what is no
        collective."""
        before = self.phase, self._gm, self._waits_in
        self.phase, self._gm, self._waits_in = phase, gm, waits_in
        self._thread_id = threading.get_ident()
        try:
            yield
        finally:
            self.phase, self._gm, self._waits_in = before

    def call(self) -> list[RollPlace] | None:
        """Where the other ranks are, by rank; None if there is no Store any more."""
        try:
            roll = self._store.add("called", 1)
            self._post(self.here(roll))
            deadline = time.monotonic() + ANSWER_S
            while True:
                places = self._places()
                silent = [p for p in places if p.roll < roll and not p.ended]
                if not silent or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        except RuntimeError:
            return None
        answered = [p if p.ended or p.roll >= roll else RollPlace(p.rank) for p in places]
        return [p for p in answered if p.rank != self._rank]

    def here(self, roll: int) -> RollPlace:
        """Where this process is."""
        frames = of_stack(sys._current_frames().get(self._thread_id))
        line, waits_in = script_line(iter(frames)), self._waits_in
        waits_in = waits_in or waiting_collective(frames, self._gm)
        return RollPlace(self._rank, roll, self.calls, self.phase, line, waits_in)

    def close(self) -> None:
        """Leave word that this process ends, and how; later calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        error: BaseException | None = getattr(sys, "last_value", None)
        with suppress(RuntimeError):
            self._explain(error)
            self._post(_farewell(self._rank, self.calls, error))
            if self._keeps_store:
                # Who still waits for word of others asks this process for it; who does not is told
                # to ask no more, since torch prints pages about a Store that is gone.
                if error is not None:
                    self._linger()
                self._store.add("called", _CLOSED)
                time.sleep(PERIOD_S)

    def _explain(self, error: BaseException | None) -> None:
        """In a word, why a collective failed that is not the compiled model's own."""
        if error is None or not is_lost_peer(error):
            return
        frames = of_error(error)
        waited = waiting_collective(frames) or "a collective"
        phase = " of the optimizer" if in_optimizer(frames) else ""
        told = guilty(self.call())
        line = script_line(iter(frames))
        sys.stderr.write(
            f"autopar: rank {self._rank} waited in {waited}{phase} after call {self.calls}, at "
            f"{line}, and {told}\n"
        )

    def _linger(self) -> None:
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline and not all(p.ended for p in self._places()):
            time.sleep(0.05)

    def _places(self) -> list[RollPlace]:
        raw: Sequence[bytes] = self._store.multi_get(self._keys)
        return [msgspec.json.decode(item, type=RollPlace) for item in raw]

    def _post(self, place: RollPlace) -> None:
        self._store.set(self._keys[self._rank], msgspec.json.encode(place).decode())

    def _answer(self) -> None:
        answered = 0
        with suppress(RuntimeError):  # The Store is gone, and nobody can ask.
            while not self._closing.wait(PERIOD_S):
                called = self._store.add("called", 0)
                if called >= _CLOSED:
                    return
                if called > answered:
                    self._post(self.here(called))
                    answered = called


def guilty(places: Sequence[RollPlace] | None) -> str:
    """Of all other ranks, those that the wait is due to, and where they are."""
    if places is None:
        return f"nobody can tell why: the Store is gone, and with it {KEEPER}"
    signs: tuple[Callable[[RollPlace], bool], ...] = (
        lambda p: not p.because_of_others and (bool(p.ended) or not p.roll),
        lambda p: bool(p.ended),
        lambda p: not p.waits_in,
        lambda _: True,
    )
    found = next(found for sign in signs if (found := [p for p in places if sign(p)]))
    more = f", as are {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more


def _farewell(rank: int, calls: int, error: BaseException | None) -> RollPlace:
    if error is None:
        return RollPlace(rank, calls=calls, ended=f"has ended after {calls} calls")
    text = next(iter(str(error).splitlines()), "")
    line = script_line(iter(of_error(error)))
    followed = isinstance(error, RankError) or is_lost_peer(error)
    if isinstance(error, RankError):
        text = text.removeprefix(f"rank {rank} ").partition(";")[0]
    ended = f"has ended with {type(error).__name__}: {text}" + (f" (at {line})" if line else "")
    return RollPlace(rank, calls=calls, ended=ended, because_of_others=followed)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that a peer is gone, or did not come in time."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
)


_BY_TORCHRUN = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
KEEPER = "torchrun" if _BY_TORCHRUN else "rank 0"
"""Who keeps the Store that the ranks met over."""


def keeps_store(rank: int) -> bool:
    """Whether this process keeps the Store."""
    return rank == 0 and not _BY_TORCHRUN
