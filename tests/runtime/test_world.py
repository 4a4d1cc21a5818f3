"""What the environment says of the world, read without joining it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.errors import ClusterError, PlanError
from autopar.ir.sharding import Sharding
from autopar.runtime.process.world import World, dtensor_placements, look, param_placements

CPU = torch.device("cpu")


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, local_size: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local_size}
    values |= {"LOCAL_WORLD_SIZE": local_size, "MASTER_PORT": 1}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str, gb: float) -> None:
    class Properties:
        total_memory = int(gb * 1e9)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())


def test_one_process_on_the_cpu() -> None:
    world = look(CPU)
    assert (world.rank, world.size, world.device, world.cluster) == (0, 1, CPU, "1xcpu")


def test_processes_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 5, 8, 4)
    world = look(CPU)
    assert (world.rank, world.size, world.cluster) == (5, 8, "2x4xcpu")


def test_a_launcher_that_says_nothing_of_nodes_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchrun(monkeypatch, 1, 4, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(
        ClusterError, match=r'of the 4 ranks share a node is not known.*cluster=.*"4xcpu" for one'
    ):
        _ = look(CPU).cluster
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ClusterError, match="3 ranks share a node, and 4 ranks are no multiple"):
        _ = look(CPU).cluster


def test_a_torchrun_of_one_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, 0, 1, 1)
    assert look(CPU).size == 1


def test_a_model_on_the_cpu_goes_to_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 8, "NVIDIA H100 80GB HBM3", 85)
    assert look(CPU).device == torch.device("cuda", 0)
    assert look(CPU).cluster == "1xH100"
    assert look(torch.device("cuda", 3)).device == torch.device("cuda", 3)
    assert look(CPU, "cpu").device == CPU
    torchrun(monkeypatch, 13, 16, 8)
    world = look(torch.device("cuda", 0))
    assert world.device == torch.device("cuda", 5)
    assert world.cluster == "2x8xH100"


@pytest.mark.parametrize(
    ("name", "gb", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 85, "A100"),
        ("NVIDIA A100-SXM4-40GB", 42, "A100-40G"),
        ("NVIDIA H200", 150, "H200"),
        ("NVIDIA H100 PCIe", 85, "H100-PCIe"),
        ("NVIDIA GH200 480GB", 102, "GH200"),
        ("NVIDIA RTX 6000 Ada Generation", 51, "RTX6000Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 102, "RTXPRO6000"),
        ("NVIDIA GeForce RTX 4090", 25, "RTX4090"),
        ("Tesla V100-SXM2-32GB", 34, "V100"),
        ("NVIDIA L4", 24, "L4"),
    ],
)
def test_devices_are_known_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, gb: float, preset: str
) -> None:
    with_gpus(monkeypatch, 1, name, gb)
    assert look(CPU).cluster == f"1x{preset}"


@pytest.mark.parametrize(
    "name", ["NVIDIA A40", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"]
)
def test_an_unknown_device_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_gpus(monkeypatch, 1, name, 48)
    with pytest.raises(ClusterError, match=rf"{name} with 44\.7 GiB is none of the devices"):
        _ = look(CPU).cluster


def test_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2, "NVIDIA H100 80GB HBM3", 85)
    torchrun(monkeypatch, 3, 4, 4)
    with pytest.raises(ClusterError, match="process 3 of its machine, which has 2 CUDA devices"):
        look(CPU)


def test_a_plan_for_gpus_needs_one() -> None:
    with pytest.raises(ClusterError, match="for CUDA devices and there is none here"):
        look(CPU, "cuda")


def test_placements_of_parameters_are_in_reversed_order() -> None:
    sharding = Sharding.parse("[S(0), R]")
    assert list(map(str, dtensor_placements(sharding))) == ["S(0)", "R"]
    assert list(map(str, param_placements(sharding))) == ["R", "S(0)"]
    with pytest.raises(PlanError, match=r"\[P\] is partial"):
        dtensor_placements(Sharding.parse("[P]"))


@pytest.mark.parametrize(
    ("config", "expected"), [("cuda:nccl", False), ("cpu:gloo,cuda:nccl", True)]
)
def test_ranks_reduce_on_hosts_if_a_backend_does(
    config: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(0, 2, torch.device("cuda"))
    assert world.has_host_backend, "autopar makes a group that does"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert world.has_host_backend is expected
