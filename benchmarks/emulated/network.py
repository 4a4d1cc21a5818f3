"""A cluster on one machine: each node a network namespace, joined to the others by links of a given
rate.

A bridge joins the nodes, one veth pair each, and a token bucket (`tc tbf`) at both ends of a pair
keeps what a node sends, and what it receives, to the rate. Ranks of one node talk through its
loopback. All of it lives in namespaces of one process (`apart`), network, mounts and processes:
when that process ends, however it ends, the kernel ends what it started and the network is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

DEVICE = "eth0"
_PACKET_BYTES = 16_000
"""The most that goes at once: less than what the host would join, so that bursts can be short."""
_QUEUE = "200ms"
"""How much may wait for a link: enough that nothing is dropped by a few connections."""
_TOOLS = ("unshare", "ip", "tc", "mount")


def apart(command: Sequence[str]) -> list[str]:
    """`command`, to be run where `build` can build."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    own = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return ["unshare", *as_root, *own, "--", *command]


def refusal() -> str | None:
    """Why no network can be made on this machine; None if one can."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"there is no {tool} here"
    trial = [sys.executable, "-m", "benchmarks.emulated.network"]
    done = subprocess.run(apart(trial), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return f"network namespaces are not permitted: {last[0]}"


def build(nodes: int, mbit_per_s: int) -> None:
    """Join so many nodes, in the namespaces of this process. RuntimeError says which command failed
    and how."""
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    _do("mount -t tmpfs tmpfs /run/netns")
    _do("ip link add bridge type bridge")
    _do("ip link set bridge up")
    for node in range(nodes):
        outside, inside = f"node{node}", f"ip -n {_name(node)}"
        _do(f"ip netns add {_name(node)}")
        _do(f"ip link add {outside} type veth peer name {DEVICE} netns {_name(node)}")
        _do(f"ip link set {outside} master bridge up")
        _do(f"ip link set {outside} gso_max_size {_PACKET_BYTES}")
        _do(f"{inside} link set {DEVICE} gso_max_size {_PACKET_BYTES}")
        _do(f"{inside} addr add {address(node)}/24 dev {DEVICE}")
        _do(f"{inside} link set lo up")
        _do(f"{inside} link set {DEVICE} up")
        limit = f"root tbf rate {mbit_per_s}mbit burst {burst_bytes(mbit_per_s)} latency {_QUEUE}"
        _do(f"tc qdisc add dev {outside} {limit}")
        _do(f"tc -n {_name(node)} qdisc add dev {DEVICE} {limit}")


def burst_bytes(mbit_per_s: int) -> int:
    """How many bytes an idle link lets pass at once: those of a millisecond, or a few packets. More
    would make a slow link fast for short messages: at 100 Mbit/s 128 KiB are 10 ms."""
    return max(2 * _PACKET_BYTES, mbit_per_s * 125)


def address(node: int) -> str:
    """Where the others find a node."""
    return f"10.0.0.{node + 1}"


def on_node(node: int) -> list[str]:
    """What is put before a command that is to run on a node."""
    return ["ip", "netns", "exec", _name(node)]


def _name(node: int) -> str:
    return f"n{node}"


def _do(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{line}: {done.stderr.strip() or f'status {done.returncode}'}")


if __name__ == "__main__":
    build(2, 1000)
    subprocess.run([*on_node(1), "true"], check=True)
