"""Waits with a limit: for a function on a thread of its own, and for answers of the c10d Store.

The keeper of a TCPStore may hang: stopped by a signal or a debugger, or on a machine that is lost.
Its clients then wait forever, also in `set`, `add` and `check`, in C++ where neither a timeout nor
Ctrl-C reaches them. Here a thread waits for the Store, and the rank waits for the thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch.distributed.distributed_c10d import Store

_Answer = TypeVar("_Answer")
_Jobs = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class SilenceError(RuntimeError):
    """What was `awaited` did not come within the time that was given for it."""

    def __init__(self, awaited: str, timeout_s: float) -> None:
        super().__init__(f"{awaited} did not come within {timeout_s:g} s")
        self.awaited = awaited


def in_time(
    timeout_s: float, awaited: str, function: Callable[..., _Answer], *args: Any, **kwargs: Any
) -> _Answer:
    """`function(*args, **kwargs)`, on a thread of its own with this one's CUDA device.

    SilenceError after `timeout_s`: the thread is abandoned, and does not delay the end of the
    process. If the function raises, its error.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def call() -> _Answer:
        if device is not None:
            torch.cuda.set_device(device)
        return function(*args, **kwargs)

    answer: Future[_Answer] = Future()
    Thread(target=_do, args=(answer, call), name="autopar wait", daemon=True).start()
    return _waited(answer, awaited, timeout_s)


class BoundedStore:
    """A connection to a c10d Store. An answer may take `timeout_s`, or the timeout of a call.
    SilenceError after that; the request may still be done later, in order. If the Store is gone,
    torch's RuntimeError."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s
        self._jobs: _Jobs = SimpleQueue()
        Thread(target=_serve, args=(self._jobs,), name="autopar store", daemon=True).start()
        finalize(self, self._jobs.put, None)

    def set(self, key: str, value: str, timeout_s: float | None = None) -> None:
        """Store `value`."""
        self._ask(timeout_s, self.store.set, key, value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of `key`, once it is there."""
        return self._ask(timeout_s, self.store.get, key)

    def add(self, key: str, amount: int, timeout_s: float | None = None) -> int:
        """The number that `key` is, with `amount` added to it."""
        return self._ask(timeout_s, self.store.add, key, amount)

    def check(self, keys: Sequence[str], timeout_s: float | None = None) -> bool:
        """Whether all `keys` are there."""
        return self._ask(timeout_s, self.store.check, list(keys))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of `keys`, once all are there."""
        return self._ask(timeout_s, self.store.multi_get, list(keys))

    def compare_set(
        self, key: str, expected: str, value: str, timeout_s: float | None = None
    ) -> bytes:
        """The value of `key`, which is set to `value` first if it is `expected`."""
        return self._ask(timeout_s, self.store.compare_set, key, expected, value)

    def is_set(self, key: str, within_s: float, timeout_s: float | None = None) -> bool:
        """Whether `key` is there within `within_s`, of which each answer may take `timeout_s`."""
        # `Store.wait` prints lines about each wait that fails.
        until, nap_s = time.monotonic() + within_s, 0.002
        while not self.check([key], timeout_s):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(nap_s, left_s))
            nap_s = min(2 * nap_s, 0.25)
        return True

    def _ask(self, timeout_s: float | None, function: Callable[..., Any], *args: Any) -> Any:
        answer: Future[Any] = Future()
        self._jobs.put((answer, lambda: function(*args)))
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return _waited(answer, "an answer of the Store", limit_s)


def _waited(answer: Future[_Answer], awaited: str, timeout_s: float) -> _Answer:
    try:
        return answer.result(timeout_s)
    except FutureTimeoutError:
        if answer.done():
            raise  # The function's own.
        answer.cancel()
        raise SilenceError(awaited, timeout_s) from None


def _do(answer: Future[Any], function: Callable[[], Any]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        _do(*job)
        del job
