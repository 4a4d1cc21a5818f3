"""Processes as torchrun starts them, for tests: gloo, on this machine, with a hard time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CHILD = """
import importlib, json, os, sys
module, _, function = sys.argv[1].rpartition(".")
result = getattr(importlib.import_module(module), function)()
with open(sys.argv[2], "w") as file:
    json.dump(result, file)
"""


def spawn(
    function: str, world_size: int, *, timeout_s: float = 240.0, lost: tuple[int, ...] = ()
) -> list[object]:
    """What `function` ("tests.runtime.workers.train") returns on each rank, through JSON; None for
    the ranks in `lost`, which may end as they like.

    AssertionError with the output of the first to fail, or of those that still run in the end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(world_size)]
        children: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank}
            ranks |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            env = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            env["PYTHONFAULTHANDLER"] = "1"  # Who dies in native code says where.
            command = [sys.executable, "-c", _CHILD, function, str(results[rank])]
            with logs[rank].open("wb") as log:
                children.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
                )
        failed: list[int] = []
        awaited = {rank: child for rank, child in enumerate(children) if rank not in lost}
        try:
            deadline = time.monotonic() + timeout_s
            while not failed and any(child.poll() is None for child in awaited.values()):
                failed = [rank for rank, child in awaited.items() if child.poll()]
                if time.monotonic() > deadline:
                    failed = [rank for rank, child in awaited.items() if child.poll() is None]
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
                child.wait()
        failed += [rank for rank, child in awaited.items() if child.poll() and not failed]
        if failed:
            told = (f"--- rank {rank}\n{logs[rank].read_text()[-6000:]}" for rank in failed)
            raise AssertionError(f"{function} failed within {timeout_s:g} s:\n" + "\n".join(told))
        return [
            json.loads(path.read_text()) if rank in awaited else None
            for rank, path in enumerate(results)
        ]
