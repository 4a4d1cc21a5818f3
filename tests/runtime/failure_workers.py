"""What the processes of `test_failures.py` do: each way in which ranks can part, once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.driver.training import session
from autopar.errors import AutoparError
from autopar.runtime.process.agreement import Agreement
from autopar.runtime.program.microbatch_run import MicrobatchRun
from autopar.runtime.torch_private import store_of_its_own
from tests.runtime.workers import RANK, batch, llama, net, points, slow_devices, staged

TIMEOUT_S = 15


def compiled(timeout_s: float = 60) -> autopar.CompiledModule:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    model = autopar.compile(net(), cluster=slow_devices(2), mesh="2")
    model(*points())["loss"].backward()
    return model


def told(call: Callable[[], object]) -> tuple[str, str]:
    """What an error says, and what the error under it says."""
    try:
        call()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}", str(error.__cause__)
    return "no error", ""


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


SHORT_S = 6
WAYS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gone": lambda: os._exit(3),
    "ended": lambda: sys.exit(4),
}
"""How a rank is lost."""


def lost() -> Any:
    """What a rank is told where the environment says of another when and how it is lost."""
    torch.set_num_threads(1)
    how, when, rank = os.environ["LOST"].split()

    def leave(now: str) -> None:
        if (now, RANK) == (when, int(rank)):
            WAYS[how]()

    def script() -> None:
        leave("start")
        in_pipeline = when == "pipeline"
        if in_pipeline:
            model, args, kwargs = staged(llama(), microbatches=4), (), batch(0)
        else:
            model, args, kwargs = (
                autopar.compile(net(), cluster=slow_devices(2), mesh="2"),
                points(),
                {},
            )
        _leave_in_planning(leave)
        model(*args, **kwargs)["loss"].backward()
        if not in_pipeline:
            dist.barrier()
        leave("second_call")
        _leave_in_stage(leave)
        loss = model(*args, **kwargs)["loss"]
        leave("backward")
        loss.backward()

    where = os.environ["STORE_URL"]
    rank_and_size = {} if where == "env://" else {"rank": RANK, "world_size": 2}
    dist.init_process_group(
        "gloo", init_method=where, timeout=timedelta(seconds=SHORT_S), **rank_and_size
    )
    # Nobody is lost before the other has the group, which torch would tell of.
    store = store_of_its_own()
    store.set(f"has the group {RANK}", "")
    store.wait([f"has the group {1 - RANK}"])
    store.set(f"waits no more {RANK}", "")
    if int(rank) == RANK:
        store.wait([f"waits no more {1 - RANK}"])
    return told(script)


def _leave_in_planning(leave: Callable[[str], None]) -> None:
    """Rank 0 as it plans, the other as it waits for the plan."""
    answer, receive = session.answer, Agreement._receive

    def answering(*args: Any) -> Any:
        leave("planning")
        return answer(*args)

    def receiving(self: Agreement, topic: str) -> bytes:
        if topic == "plan":
            leave("planning")
        return receive(self, topic)

    session.answer, Agreement._receive = answering, receiving  # type: ignore[method-assign]


def _leave_in_stage(leave: Callable[[str], None]) -> None:
    """As the second microbatch comes."""
    forward = MicrobatchRun.forward

    def parting(self: MicrobatchRun, microbatch: int, *given: Any) -> Any:
        if microbatch == 1:
            leave("pipeline")
        return forward(self, microbatch, *given)

    MicrobatchRun.forward = parting  # type: ignore[method-assign]
