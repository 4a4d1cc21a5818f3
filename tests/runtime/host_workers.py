"""What the processes of `test_hosts.py` do: ranks that think they are on several hosts."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

import autopar
from autopar.errors import ClusterError
from autopar.runtime.process.world import join
from tests.runtime.workers import RANK, net, points


def _on(name: str) -> None:
    torch.set_num_threads(1)
    socket.gethostname = lambda: f"host {name}"
    del os.environ["LOCAL_WORLD_SIZE"]


def learned() -> Any:
    """The cluster of the world, and that of the plan."""
    _on("ab"[RANK])
    model = autopar.compile(net())
    model(*points())["loss"].backward()
    return [join(torch.device("cpu")).cluster, model.plans[0].structure.cluster]


def unfit() -> str:
    """What is told."""
    _on(os.environ["HOSTS"][RANK])
    try:
        autopar.compile(net())
    except ClusterError as error:
        return str(error).partition(" failed: ")[2] or str(error)
    return ""
