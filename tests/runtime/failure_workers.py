"""What the processes of `test_failures.py` do: each way in which ranks can part, once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.errors import AutoparError
from tests.runtime.workers import RANK, net, points, slow_devices

TIMEOUT_S = 15


def compiled(timeout_s: float = 60) -> autopar.CompiledModule:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    model = autopar.compile(net(), cluster=slow_devices(2), mesh="2")
    model(*points())["loss"].backward()
    return model


def told(call: Callable[[], object]) -> tuple[str, float, str]:
    """What an error says, after how many seconds, and what the error under it says."""
    start_s = time.monotonic()
    try:
        call()
    except AutoparError as error:
        text = f"{type(error).__name__}: {error}"
        return text, time.monotonic() - start_s, str(error.__cause__)
    return "no error", time.monotonic() - start_s, ""


def together() -> dict[str, Any]:
    """What every rank is told, and can go on after."""
    model = compiled()
    odd = RANK == 1
    seen: dict[str, Any] = {}
    seen["batch"] = told(lambda: model(*points(seed=int(odd))))
    x, y = points()
    shuffled = (x.flip(0), y.flip(0)) if odd else (x, y)
    seen["order"] = told(lambda: model(*shuffled))
    seen["shape"] = told(lambda: model(*points(4 if odd else 8)))
    with torch.set_grad_enabled(not odd):
        seen["gradients"] = told(lambda: model(*points()))
    model.train(not odd)
    seen["mode"] = told(lambda: model(*points()))
    model.train()
    other = autopar.compile(net(), cluster=slow_devices(2), mesh="2")
    seen["model"] = told(lambda: (other if odd else model)(*points()))
    time.sleep(1.5 * RANK)  # longer than a rank's patience: it asks, and goes on waiting
    seen["late"] = told(lambda: model(*points())["loss"].backward())
    start_s = time.perf_counter()
    for _ in range(100):
        model(*points())
    seen["call s"] = (time.perf_counter() - start_s) / 100
    return seen


def alone() -> Any:
    """Rank 0 evaluates, rank 1 waits for it."""
    model = compiled()
    if RANK == 1:
        try:
            dist.barrier()
        except RuntimeError:
            return "the barrier broke"
    found = told(lambda: model(*points()))
    time.sleep(1.0)
    return found


def in_backward(what: Callable[[], None], timeout_s: float = 60) -> Any:
    model = compiled(timeout_s)
    loss = model(*points())["loss"]
    if RANK == 1:
        what()
        return None
    return told(loss.backward)


def killed() -> Any:
    return in_backward(lambda: os.kill(os.getpid(), signal.SIGKILL))


def asleep() -> Any:
    return in_backward(lambda: time.sleep(TIMEOUT_S + 10), TIMEOUT_S)


def raising() -> Any:
    def fail() -> None:
        raise ValueError("no such file")

    return in_backward(fail)


def skipping() -> Any:
    """Rank 1 leaves the backward out, and goes on to the next call."""
    model = compiled()
    loss = model(*points())["loss"]
    return told(loss.backward if RANK == 0 else lambda: model(*points()))
