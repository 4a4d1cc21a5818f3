"""Which ranks share a node: what ranks say of themselves, what launchers say, and what to do where
that does not fit."""

from __future__ import annotations

import os
import re
from typing import Any, cast

import pytest

from autopar.errors import ClusterError
from autopar.runtime.process.hosts import (
    RankHost,
    check_blocks,
    local_rank,
    local_size_from,
    process_state,
    ranks_per_node,
    this_host,
)
from tests.runtime.spawn import spawn


def hosts(names: str, sizes: tuple[int | None, ...] = (), kernels: str = "") -> list[RankHost]:
    """Ranks on hosts of one letter each, on kernels of their own unless given, with the sizes that
    torchrun says."""
    said = sizes or (None,) * len(names)
    each = zip(names, said, kernels or names, strict=True)
    return [
        RankHost(rank, f"host-{name}", kernel, f"{name} {kernel}", 100 + rank, local_size=size)
        for rank, (name, size, kernel) in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [
        (hosts("aaaa"), 4),
        (hosts("aabb"), 2),
        (hosts("abcd"), 1),
        (hosts("aabb", (2, 2, 2, 2)), 2),
        # Nodes that are thought: several torchruns on one machine.
        (hosts("aaaa", (2, 2, 2, 2)), 2),
        (hosts("aaaa", (1, 1, 1, 1)), 1),
        (hosts("aabb", (1, 1, 1, 1)), 1),
        # Containers of one machine, with and without torchrun's word.
        (hosts("aabb", (4, 4, 4, 4), kernels="kkkk"), 4),
        (hosts("abcd", (2, 2, 2, 2), kernels="kkkk"), 2),
        (hosts("aabb", kernels="kkkk"), 2),
        # Two machines of one name.
        (hosts("aaaa", kernels="kkll"), 2),
        # What some ranks alone are told is no word.
        (hosts("aabb", (4, None, None, None)), 2),
    ],
)
def test_ranks_per_node(ranks: list[RankHost], per_node: int) -> None:
    assert ranks_per_node(ranks) == per_node


ORDER = r"start the ranks of a host one after the other \(torchrun does; srun --distribution=block"
EQUAL = "a mesh needs as many ranks on each node: start so many, or describe the devices with clus"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            hosts("aaab"),
            r"hosts have unequal numbers of ranks \(host-a has 3 ranks \(0, 1, 2\), host-b has 1 "
            rf"rank \(3\)\): {EQUAL}",
        ),
        (
            hosts("aaab", (3, 3, 3, 1)),
            r"nodes have unequal numbers of ranks: LOCAL_WORLD_SIZE is 3 on ranks 0, 1, 2, 1 on "
            rf"rank 3 \(host-a has 3 ranks .*\): {EQUAL}",
        ),
        (
            hosts("abab"),
            r"the ranks of a host do not follow each other \(host-a has 2 ranks \(0, 2\), host-b "
            rf"has 2 ranks \(1, 3\)\), and a mesh takes ranks in order: {ORDER}",
        ),
        (hosts("abab", (2, 2, 2, 2)), rf"the ranks of a host do not follow .*: {ORDER}"),
        (hosts("abba", (2, 2, 2, 2)), rf"the ranks of a host do not follow .*: {ORDER}"),
        (
            hosts("aabb", (4, 4, 4, 4)),
            r"LOCAL_WORLD_SIZE is 4, which puts ranks 0, 1, 2, 3 on one node, and they are on "
            r"several \(host-a has 2 ranks \(0, 1\), host-b has 2 ranks \(2, 3\)\): set it to the "
            "number of ranks on each node, or do not set it",
        ),
        (
            hosts("aabb", (3, 3, 3, 3)),
            r"LOCAL_WORLD_SIZE is 3, and 4 ranks are no multiple of that \(host-a has 2 .*\): set ",
        ),
        (hosts("aabb", (0, 0, 0, 0)), "LOCAL_WORLD_SIZE is 0, and 4 ranks are no multiple of"),
        (hosts("abcdefg" + "a"), r"host-d has 1 rank \(3\), and 3 more hosts\)"),
    ],
)
def test_ranks_that_are_on_no_nodes_of_equal_size(ranks: list[RankHost], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        ranks_per_node(ranks)


def test_a_cluster_that_is_given_may_have_smaller_or_larger_nodes() -> None:
    for names in ("aaaa", "aabb", "abcd"):
        for size in (1, 2, 4):
            check_blocks(hosts(names), size, "lab")
    for names, size in (("abab", 2), ("abba", 2), ("aaab", 2)):
        with pytest.raises(
            ClusterError, match=rf"cluster lab has {size} ranks on each .*: {ORDER}"
        ):
            check_blocks(hosts(names), size, "lab")


SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 2),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4"}, 4),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "LOCAL_WORLD_SIZE": "4"}, 4),
        # A step of fewer tasks than the job, and torchruns that Slurm started.
        (SLURM | {"SLURM_TASKS_PER_NODE": "8(x2)"}, None),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),
        (SLURM | {"SLURM_TASKS_PER_NODE": "two"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, 2),
    ],
)
def test_what_launchers_say(environment: dict[str, str], size: int | None) -> None:
    assert local_size_from(environment, 4) == size


def test_what_launchers_say_and_cannot_be_used() -> None:
    with pytest.raises(
        ClusterError, match=r"unequal numbers of ranks: SLURM_TASKS_PER_NODE is 3,1"
    ):
        local_size_from(SLURM | {"SLURM_TASKS_PER_NODE": "3,1"}, 4)
    with pytest.raises(ClusterError, match="LOCAL_WORLD_SIZE is 'all', which is no number"):
        local_size_from({"LOCAL_WORLD_SIZE": "all"}, 4)


@pytest.mark.parametrize(
    ("environment", "rank", "devices", "place"),
    [
        ({}, 5, 4, 1),
        ({"LOCAL_RANK": "3"}, 5, 4, 3),
        ({"LOCAL_RANK": "5"}, 5, 4, 5),  # which is told, by who takes the device
        (SLURM, 2, 4, 0),
        (SLURM | {"SLURM_LOCALID": "3"}, 2, 1, 0),  # a device for each task alone
        (SLURM, 3, 4, 3),  # of another process
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 7, 4, 1),
        ({"MPI_LOCALRANKID": "1"}, 7, 4, 1),
    ],
)
def test_the_device_of_a_rank(
    environment: dict[str, str], rank: int, devices: int, place: int
) -> None:
    assert local_rank(environment, rank, devices) == place


def test_what_can_be_seen_of_a_process() -> None:
    here = this_host(3)
    assert str(here) == f"rank 3 (process {os.getpid()} on {here.name})"
    assert process_state(here) == ""
    child = os.fork()
    if not child:
        os._exit(0)
    other: dict[str, Any] = {"pid": child, "started": "0"}
    gone = RankHost(1, here.name, here.kernel, here.host, pid_namespace=here.pid_namespace, **other)
    assert process_state(gone) == "gone"  # one that is not waited for, of another start
    os.waitpid(child, 0)
    assert process_state(gone) == "gone"
    far = RankHost(1, here.name, "another", here.host, pid_namespace=here.pid_namespace, **other)
    assert process_state(far) == ""


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_ranks_learn_where_they_are() -> None:
    """On hosts of several names, with no word of the launcher."""
    found = spawn("tests.runtime.host_workers.learned", 2, timeout_s=200)
    assert found == [["2x1xcpu"] * 2] * 2


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("abab", r"host a has 2 ranks \(0, 2\), host b has 2 ranks \(1, 3\)\), and a mesh takes "),
        ("aaab", r"hosts have unequal numbers of ranks \(host a has 3 ranks \(0, 1, 2\), host b "),
    ],
)
def test_every_rank_is_told_of_hosts_that_do_not_fit(names: str, said: str) -> None:
    env = {"HOSTS": names}
    found = spawn("tests.runtime.host_workers.unfit", 4, timeout_s=300, env=env)
    assert len(set(cast("list[str]", found))) == 1
    assert re.search(said, str(found[0]))
