"""The ranks of a run, each a process of one thread."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.1


def told_by(module: str, *options: str) -> bytes:
    """The last line that `python -m module` prints in a fresh process with one thread.
    CalledProcessError if that fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ},
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def run_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    local_ranks: int | None = None,
    address: str = "127.0.0.1",
    before: Callable[[int], Sequence[str]] = lambda rank: (),
    env: Mapping[str, str] | None = None,
) -> bytes | None:
    """What rank 0 of `ranks` processes prints; None if one of them fails, whose others are ended.

    They find each other as torchrun's do, rank 0 at `address`; `local_ranks` of them (all, if left
    out) are to think that they share a machine. `before(rank)` is put before the command.
    """
    local = local_ranks or ranks
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local)}
    shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as told:
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local)}
                output = subprocess.DEVNULL if rank else told
                line = [*before(rank), *command]
                children.append(subprocess.Popen(line, cwd=ROOT, env=shared | own, stdout=output))
            if not _all_well(children):
                return None
        finally:
            for child in children:
                child.kill()
                child.wait()
        told.seek(0)
        return told.read()


def _all_well(children: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether all end with status 0; as soon as one does not, False."""
    while True:
        statuses = [child.poll() for child in children]
        if any(statuses):
            return False
        if None not in statuses:
            return True
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
