"""Processes as torchrun starts them, for tests: gloo, on this machine, with a hard time limit."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.runtime.forks import Work

ROOT = Path(__file__).resolve().parents[2]


def spawn(
    function: str,
    world_size: int,
    *,
    timeout_s: float = 240.0,
    lost: tuple[int, ...] = (),
    env: Mapping[str, str] | None = None,
) -> list[object]:
    """What `function` ("tests.runtime.workers.train") returns on each rank, through JSON; None for
    the ranks in `lost`, which may end as they like. `env` is put over their environment.

    AssertionError with the output of the first to fail, or of those that still run in the end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, _servers(world_size) as servers:
        results = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(world_size)]
        awaited = {rank: each for rank, each in enumerate(servers) if rank not in lost}
        failed: list[int] = []
        try:
            for rank, server in enumerate(servers):
                more = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
                more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                own = _environment(rank) | more | dict(env or {})
                server.start(Work(function, str(results[rank]), str(logs[rank]), own))
            deadline = time.monotonic() + timeout_s
            while not failed and any(server.poll() is None for server in awaited.values()):
                failed = [rank for rank, server in awaited.items() if server.poll()]
                if time.monotonic() > deadline:
                    failed = [rank for rank, server in awaited.items() if server.poll() is None]
                time.sleep(0.05)
        finally:
            for server in servers:
                server.kill()
        failed += [rank for rank, server in awaited.items() if server.poll() and not failed]
        if failed:
            told = (f"--- rank {rank}\n{logs[rank].read_text()[-6000:]}" for rank in failed)
            raise AssertionError(f"{function} failed within {timeout_s:g} s:\n" + "\n".join(told))
        return [
            json.loads(path.read_text()) if rank in awaited else None
            for rank, path in enumerate(results)
        ]


def _environment(rank: int) -> dict[str, str]:
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}


class _Server:
    """A process that forks those of one rank (`tests.runtime.forks`), one at a time."""

    def __init__(self, rank: int) -> None:
        command = [sys.executable, "-m", "tests.runtime.forks"]
        self.rank = rank
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(rank), bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = 0
        self.code: int | None = 0

    def start(self, work: Work) -> None:
        self.code = None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(work).encode() + b"\n")
        self.pid = self._number()

    def poll(self) -> int | None:
        """How its process ended, or None while it runs."""
        if self.code is None and select.select([self.process.stdout], [], [], 0)[0]:
            self.code = self._number()
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = self._number()

    def close(self) -> None:
        """Ends it; what it forked has ended."""
        with self.process:  # which closes its pipes, and waits
            self.process.kill()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


_idle: dict[int, list[_Server]] = defaultdict(list)


@contextmanager
def _servers(world_size: int) -> Iterator[list[_Server]]:
    """One for each rank: they are started where none is idle, and go on as long as the tests do."""
    servers = [_idle[rank].pop() if _idle[rank] else _Server(rank) for rank in range(world_size)]
    try:
        yield servers
    except BaseException:
        # What state they are in is not known.
        for server in servers:
            server.close()
        raise
    for server in servers:
        _idle[server.rank].append(server)


@atexit.register
def _close_idle() -> None:
    for server in (each for servers in _idle.values() for each in servers):
        server.close()
