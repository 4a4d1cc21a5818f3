"""Which ranks share a machine, by the ranks' own hosts and by their launcher.

A mesh takes the ranks of a node one after the other. Each rank reports its host; the launcher's
figures are checked against that (docs/training.md, "Which ranks share a machine").
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import msgspec

from autopar.errors import ClusterError, listed
from autopar.ir.grouping import grouped

_SHOWN_HOSTS = 4
_SHOWN_RANKS = 8
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class RankHost(msgspec.Struct, frozen=True):
    """Where rank `rank` runs. `started` and `pid_namespace` tell its process from a later one with
    the same `pid`. `host` identifies hosts as NCCL does (name and kernel, or NCCL_HOSTID).
    `local_size` is torchrun's number of ranks on the node."""

    rank: int
    name: str
    kernel: str
    host: str
    pid: int
    pid_namespace: str = ""
    started: str = ""
    local_size: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.name})"


def this_host(rank: int) -> RankHost:
    """Where this process runs, which is `rank`. ClusterError if LOCAL_WORLD_SIZE is no number."""
    name, kernel = socket.gethostname(), text_of("/proc/sys/kernel/random/boot_id")
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    started = _stat(os.getpid())
    return RankHost(
        rank,
        name,
        kernel or name,
        os.environ.get("NCCL_HOSTID") or f"{name} {kernel}",
        os.getpid(),
        namespace,
        started[1] if started else "",
        _number(os.environ, "LOCAL_WORLD_SIZE"),
    )


def process_state(process: RankHost) -> str:
    """ "gone" or "stopped" if that can be seen from this machine; else empty."""
    here = this_host(process.rank)
    if not process.started or (here.kernel, here.pid_namespace) != (
        process.kernel,
        process.pid_namespace,
    ):
        return ""
    stat = _stat(process.pid)
    if stat is None or stat[1] != process.started or stat[0] in "ZX":
        return "gone"
    return "stopped" if stat[0] in "Tt" else ""


def ranks_per_node(hosts: Sequence[RankHost]) -> int:
    """How many ranks each node has, of ranks in order.

    torchrun's LOCAL_WORLD_SIZE is used if the ranks that it puts on a node share a kernel; without
    it, a node is a host. ClusterError if nodes have unequal numbers of ranks, if ranks of a host do
    not follow each other, or if LOCAL_WORLD_SIZE cannot be right.
    """
    local_sizes = {each.local_size for each in hosts}
    size = next(iter(local_sizes))
    if len(local_sizes) > 1 and None not in local_sizes:
        raise ClusterError(
            f"nodes have unequal numbers of ranks: LOCAL_WORLD_SIZE is {_local_sizes(hosts)} "
            f"({_hosts_text(hosts)}): {_EQUAL}"
        )
    if len(local_sizes) > 1 or size is None:
        return _by_hosts(hosts)
    if size < 1 or len(hosts) % size:
        raise ClusterError(
            f"LOCAL_WORLD_SIZE is {size}, and {len(hosts)} ranks are no multiple of that "
            f"({_hosts_text(hosts)}): set it to the number of ranks on each node, or do not set it"
        )
    for first in range(0, len(hosts), size):
        block = hosts[first : first + size]
        if len({each.kernel for each in block}) > 1:
            _by_hosts(hosts)  # Where that fails as well, it says more.
            raise ClusterError(
                f"LOCAL_WORLD_SIZE is {size}, which puts {ranks_text([r.rank for r in block])} "
                f"on one node, and they are on several ({_hosts_text(hosts)}): set it to the "
                "number of ranks on each node, or do not set it"
            )
    return size


def check_blocks(hosts: Sequence[RankHost], size: int, cluster: str) -> None:
    """ClusterError if nodes of `cluster`, which have `size` consecutive ranks each, lie across
    hosts. A node may be a part of a host, or several whole ones."""
    blocks = [frozenset(range(first, first + size)) for first in range(0, len(hosts), size)]
    for ranks in _by_host(hosts).values():
        here = frozenset(ranks)
        for block in blocks:
            if here & block and not (here <= block or block <= here):
                raise ClusterError(
                    f"cluster {cluster} has {size} ranks on each node, one after the other, and "
                    f"{_hosts_text(hosts)}: {_IN_ORDER}"
                )


def local_size_from(environment: Mapping[str, str], world_size: int) -> int | None:
    """How many ranks are on each node, by the launcher; None if it gives no number, or is about
    another number of ranks. ClusterError if nodes have unequal numbers."""
    local_size = _number(environment, "LOCAL_WORLD_SIZE")
    if local_size is None and world_size in {_number(environment, name) for name in _SIZES}:
        local_size = next(filter(None, (_number(environment, name) for name in _LOCAL_SIZES)), None)
    if local_size is not None:
        return local_size
    if _number(environment, "SLURM_NTASKS") != world_size:
        return None
    for name in _SLURM_TASKS:
        counts = _expanded(environment.get(name, ""))
        if sum(counts) == world_size:
            if len(set(counts)) > 1:
                raise ClusterError(
                    f"nodes have unequal numbers of ranks: {name} is {environment[name]}: {_EQUAL}"
                )
            return counts[0]
    return None


def local_rank(environment: Mapping[str, str], rank: int, num_devices: int) -> int:
    """The number of this rank on its node, and so its device. torchrun's is used as it is. That of
    other launchers, which may show each rank its own devices alone, is taken modulo
    `num_devices`."""
    own_rank = _number(environment, "LOCAL_RANK")
    if own_rank is not None:
        return own_rank
    if _number(environment, "SLURM_PROCID") == rank:
        own_rank = _number(environment, "SLURM_LOCALID")
    names = (_number(environment, name) for name in _LOCAL_RANKS)
    number = next((each for each in (own_rank, *names) if each is not None), rank)
    return number % num_devices


_EQUAL = (
    "a mesh needs as many ranks on each node: start so many, or describe the devices with cluster="
)
_IN_ORDER = (
    "start the ranks of a host one after the other (torchrun does; srun --distribution=block, "
    "mpirun --map-by slot)"
)


def _by_hosts(hosts: Sequence[RankHost]) -> int:
    ranks = list(_by_host(hosts).values())
    if len({len(each) for each in ranks}) > 1:
        raise ClusterError(f"hosts have unequal numbers of ranks ({_hosts_text(hosts)}): {_EQUAL}")
    if any(each != list(range(each[0], each[0] + len(each))) for each in ranks):
        raise ClusterError(
            f"the ranks of a host do not follow each other ({_hosts_text(hosts)}), and a mesh "
            f"takes ranks in order: {_IN_ORDER}"
        )
    return len(ranks[0])


def _by_host(hosts: Sequence[RankHost]) -> dict[str, list[int]]:
    return grouped((each.host, each.rank) for each in hosts)


def _hosts_text(hosts: Sequence[RankHost]) -> str:
    """`a has 3 ranks (0, 1, 2), b has 1 rank (3)`."""
    texts = [
        f"{hosts[ranks[0]].name} has {len(ranks)} rank{'s' if len(ranks) > 1 else ''} "
        f"({listed(ranks, _SHOWN_RANKS)})"
        for ranks in _by_host(hosts).values()
    ]
    more = len(texts) - _SHOWN_HOSTS
    return ", ".join(texts[:_SHOWN_HOSTS]) + (f", and {more} more hosts" if more > 0 else "")


def _local_sizes(hosts: Sequence[RankHost]) -> str:
    runs = [(size, [each.rank for each in run]) for size, run in
            groupby(hosts, key=lambda each: each.local_size)]  # fmt: skip
    return ", ".join(f"{size} on {ranks_text(ranks)}" for size, ranks in runs[:_SHOWN_HOSTS])


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`; `ranks 0, 1 and 2 more`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, _SHOWN_RANKS)}"


def _expanded(text: str) -> list[int]:
    """Slurm's `4(x2),3` as 4, 4, 3; nothing if it is no such text."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(parts):
        return []
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name} is {text!r}, which is no number") from None


def _stat(pid: int) -> tuple[str, str] | None:
    """(state, start time) of a process; None if there is none, or if that is not known."""
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else None


def text_of(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
