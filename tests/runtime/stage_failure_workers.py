"""What the processes of `test_stages.py` do where one is lost in the midst of a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.program.microbatch_run import MicrobatchRun
from tests.runtime.workers import RANK, batch, llama, staged

TIMEOUT_S = 15


def compiled(timeout_s: float = 60) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    model = staged(llama(), microbatches=4)
    model(**batch(0)).loss.backward()
    return model


def lost(what: Callable[[], None], timeout_s: float = 60) -> Any:
    """What rank 0 is told if rank 1 does something else in the midst of a step."""
    model = compiled(timeout_s)
    if RANK == 1:
        _in_stage_1(model, what)
    try:
        model(**batch(1)).loss.backward()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _in_stage_1(model: Any, what: Callable[[], None]) -> None:
    """Have `what` done as the second microbatch comes."""
    forward = MicrobatchRun.forward

    def parting(self: MicrobatchRun, microbatch: int, *given: Any) -> Any:
        if microbatch == 1:
            what()
        return forward(self, microbatch, *given)

    MicrobatchRun.forward = parting  # type: ignore[method-assign]


def killed() -> Any:
    return lost(lambda: os.kill(os.getpid(), signal.SIGKILL))


def asleep() -> Any:
    return lost(lambda: time.sleep(TIMEOUT_S + 10), TIMEOUT_S)


def raising() -> Any:
    def fail() -> None:
        raise ValueError("no such file")

    return lost(fail)
