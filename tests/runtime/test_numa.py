"""Memory is pinned on the NUMA node of the device, as Linux tells of nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.runtime.ops import host_copies

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine whose second GPU is on node 1, at 0001:3b:02.0."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(host_copies, "SYSTEM", tmp_path)
    (tmp_path / "bus/pci/devices/0001:3b:02.0").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    host_copies.cpus_near.cache_clear()
    yield tmp_path
    host_copies.cpus_near.cache_clear()


def has(system: Path, node: int, cpus: str) -> None:
    (system / "bus/pci/devices/0001:3b:02.0/numa_node").write_text(f"{node}\n")
    (system / "devices/system/node/node1/cpulist").write_text(f"{cpus}\n")


def test_processors_of_a_node(system: Path) -> None:
    has(system, 1, "4-6,9,12-13")
    assert host_copies.cpus_near(DEVICE) == {4, 5, 6, 9, 12, 13}


def test_a_machine_of_one_node(system: Path) -> None:
    has(system, -1, "0")
    assert host_copies.cpus_near(DEVICE) == frozenset()


def test_a_thread_is_near_and_comes_back(system: Path) -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    has(system, 1, f"{last},{last + 1000}")
    with pytest.raises(RuntimeError), host_copies.near_device(DEVICE):
        assert os.sched_getaffinity(0) == {last}
        raise RuntimeError
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cpus", ["", "100000-100001"])
def test_a_thread_stays_where_it_may_be(system: Path, cpus: str) -> None:
    before = os.sched_getaffinity(0)
    has(system, 1, cpus)
    with host_copies.near_device(DEVICE):
        assert os.sched_getaffinity(0) == before


def test_room_for_a_copy_is_near(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    has(system, 1, f"{last}")
    asked: list[tuple[set[int], dict[str, Any]]] = []

    def empty_like(_: Any, **how: Any) -> None:
        asked.append((os.sched_getaffinity(0), how))

    monkeypatch.setattr(torch, "empty_like", empty_like)
    x: Any = SimpleNamespace(device=DEVICE)
    host_copies.room_for(x)
    assert asked == [({last}, {"device": "cpu", "pin_memory": True})]
    assert os.sched_getaffinity(0) == before
