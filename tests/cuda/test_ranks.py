"""Two ranks over NCCL. They may share a GPU: each says that it is on a machine of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.ranks import CASES
from tests.cuda.test_one_device import TOLERANCE

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280
"""Less than a test may take: a rank that waits for one that has failed is ended, and told."""


@cache
def found() -> list[dict[str, Any]]:
    """What each rank told of each case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.ranks"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, env=_environment(rank, port),
        )
        for rank in range(2)
    ]  # fmt: skip
    told: list[dict[str, Any]] = []
    try:
        for rank in ranks:
            lines = rank.communicate(timeout=LIMIT_S)[0].splitlines()
            each = [json.loads(line) for line in lines if line.startswith("{")]
            told.append({case.pop("case"): case for case in each})
    finally:
        for rank in ranks:
            rank.kill()
    return told


def _environment(rank: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        # NCCL refuses a GPU that two ranks of one machine have, and talks through sockets else.
        "NCCL_HOSTID": f"machine {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_device_does(case: str) -> None:
    for rank in found():
        seen = rank[case]
        assert "error" not in seen, seen["error"]
        assert max(seen.values()) < TOLERANCE, seen
