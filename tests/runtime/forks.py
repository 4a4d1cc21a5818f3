"""Forks one rank after the other of those that `spawn` starts, with all imported that they import:
that takes longer than what most of them do. Each rank has a server of its own, so that ranks differ
in how they hash, as processes of their own do."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

PRELOADED = (
    "tests.runtime.workers",
    "torch.distributed.checkpoint.state_dict",
    "torch.optim.swa_utils",
)


class Work(NamedTuple):
    """What a rank is to do: `function`, whose result goes to a file; what it prints, to another."""

    function: str
    result: str
    log: str
    env: dict[str, str]


def serve() -> Work:
    """Returns in the ranks alone, each with its work. Says of each what its process is, and how it
    ended; ends itself with the last line that comes in."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            out.close()
            return Work(*json.loads(line))
        print(pid, file=out)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=out)
    sys.exit()


def become(work: Work) -> None:
    """A process as if it had been started for that work."""
    with Path(os.devnull).open() as nothing, Path(work.log).open("wb") as log:
        os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ.clear()
    os.environ.update(work.env)
    faulthandler.enable()  # Who dies in native code says where.
    random.seed()
    np.random.seed()  # noqa: NPY002


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    work = serve()
    become(work)
    module, _, function = work.function.rpartition(".")
    result = getattr(importlib.import_module(module), function)()
    Path(work.result).write_text(json.dumps(result))
