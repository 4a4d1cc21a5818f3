"""The process groups of a pipeline: of each stage's mesh, of the copies of tied weights, and of
pairs of ranks that send messages."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import Replicate

from autopar.errors import PlanError, RankError
from autopar.ir.choices import ParamChoice
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.plans.structure import Stage
from autopar.runtime.dtensor_private import is_of
from autopar.runtime.process.own_group import as_bytes
from autopar.runtime.process.part_tensors import know
from autopar.runtime.process.world import Groups, ParamPlace, World, make_groups, param_placements
from autopar.runtime.torch_private import backend_of_two, limit_waiting

COPY_AXIS = "stage"
"""The mesh axis along which a tied weight has copies."""


_SERIAL = itertools.count()


class PairChannels:
    """Channels from one rank to another, one for each direction, so that two ranks can send each
    other messages at the same time. All pipelines of a process share them, one step after the
    other."""

    def __init__(self, world: World) -> None:
        assert world.store is not None and world.pre_step_check is not None
        self._pre_step_check = world.pre_step_check
        self._rank, self._device = world.rank, world.device
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"autopar/channels/{attempt}/{next(_SERIAL)}", world.store.store)
        self._channels: dict[tuple[int, int], Any] = {}
        self._is_broken = False

    def open(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Open missing channels from the first rank of each pair to the second, of which this rank
        is one. A collective call of the two: all ranks open theirs."""
        for source, target in sorted(set(pairs) - self._channels.keys()):
            self._pre_step_check.within(
                f"messages from rank {source} to rank {target}", self._open, source, target
            )

    def _open(self, source: int, target: int) -> None:
        store = PrefixStore(f"{source}/{target}", self._store)
        place = int(self._rank == target)
        self._channels[source, target] = backend_of_two(store, place, self._device)
        # A channel connects at its first message, for which one rank waits for the other.
        first = torch.zeros(1, device=self._device)
        (self.receive(source, first) if place else self.send(target, first)).wait()

    def send(self, target: int, tensor: Tensor) -> Any:
        """Send `tensor`, contiguous, to a rank; to be waited for. It must not change until then."""
        self._check()
        return self._channels[self._rank, target].send([as_bytes(tensor)], 1, 0)

    def receive(self, source: int, tensor: Tensor) -> Any:
        """Receive `tensor`, contiguous, from a rank; to be waited for."""
        self._check()
        return self._channels[source, self._rank].recv([as_bytes(tensor)], 0, 0)

    def break_off(self) -> None:
        """A step has failed: messages under way are lost, and none can follow them."""
        self._is_broken = True

    def _check(self) -> None:
        if self._is_broken:
            raise RankError(
                "a step of this pipeline failed half-way, and the messages between its ranks are "
                "lost: start again from a checkpoint"
            )


_channels: WeakKeyDictionary[dist.ProcessGroup, PairChannels] = WeakKeyDictionary()
"""By the default process group, with which they end: closing a channel while others send may crash
the process."""


def channels_of(world: World) -> PairChannels:
    """Those of the default process group."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _channels:
        _channels[group] = PairChannels(world)
    return _channels[group]


@dataclass(frozen=True, slots=True)
class StageGroups:
    """The groups of stages, by number; stages on the same ranks share theirs. `storage` has the
    first ranks of the stages that hold each parameter, and its sharding there. For parameters of
    several stages, `copies` has the mesh, by these first ranks."""

    stages: tuple[Groups, ...]
    first_ranks: tuple[int, ...]
    storage: Mapping[str, tuple[tuple[int, ...], Sharding]]
    copies: Mapping[tuple[int, ...], DeviceMesh]
    channels: PairChannels = field(repr=False)

    def place(self, name: str) -> ParamPlace:
        """Where a parameter lies."""
        first_ranks, sharding = self.storage[name]
        if len(first_ranks) == 1:
            return self.stages[self.first_ranks.index(first_ranks[0])].stored(sharding)
        return ParamPlace(self.copies[first_ranks], (*param_placements(sharding), Replicate()))


def storage_in_stages(stages: Sequence[Stage]) -> dict[str, tuple[tuple[int, ...], Sharding]]:
    """For each parameter, the first ranks of the stages that have it, and its sharding. PlanError
    if stages store it differently, or some on the host and some on the device."""
    ranks: dict[str, set[int]] = {}
    choices: dict[str, ParamChoice] = {}
    for stage in stages:
        for name, param in stage.params.items():
            if param.residency == "external":
                continue
            ranks.setdefault(name, set()).add(stage.first_rank)
            choice = param.choice
            known = choices.setdefault(name, choice)
            if (known.storage, known.num_on_host) != (choice.storage, choice.num_on_host):
                raise PlanError(
                    f"parameter {name} is tied across stages, which store it as "
                    f"{_described(known)} and as {_described(choice)}: its copies must be "
                    "stored alike; plan again"
                )
    return {name: (tuple(sorted(ranks[name])), each.storage) for name, each in choices.items()}


def _described(choice: ParamChoice) -> str:
    return f"{choice.storage} on the host" if choice.num_on_host else str(choice.storage)


def make_stage_groups(stages: Sequence[Stage], world: World) -> StageGroups:
    """The process groups of a pipeline over all ranks of `world`. A collective call."""
    meshes = {stage.first_rank: stage.mesh for stage in stages}
    storage = storage_in_stages(stages)
    groups = {first: make_groups(mesh, world, first) for first, mesh in sorted(meshes.items())}
    several = sorted({ranks for ranks, _ in storage.values() if len(ranks) > 1})
    copies = {ranks: _mesh_of_copies(ranks, meshes, world) for ranks in several}
    firsts = tuple(stage.first_rank for stage in stages)
    assert world.device_mesh is not None
    meshes_of_stages = (m for g in groups.values() for m in (g.params, g.others))
    know((*meshes_of_stages, *copies.values()), world.device_mesh)
    at = tuple(groups[first] for first in firsts)
    return StageGroups(at, firsts, storage, copies, channels_of(world))


def _mesh_of_copies(
    first_ranks: Sequence[int], meshes: Mapping[int, Mesh], world: World
) -> DeviceMesh:
    """The meshes that begin at `first_ranks`, side by side, in the order of `Groups.params` and
    then from one to the next."""
    mesh = meshes[first_ranks[0]]
    if any(meshes[first].sizes != mesh.sizes for first in first_ranks):
        raise PlanError("a weight is tied across stages on meshes that differ; plan again")
    ranks = torch.stack([torch.arange(k, k + mesh.num_devices) for k in first_ranks])
    shaped = ranks.reshape(-1, *mesh.sizes)
    ordered = shaped.permute(tuple(reversed(range(shaped.dim())))).contiguous()
    taken = set(mesh.names)
    extra = next(name for k in range(len(taken) + 1) if (name := COPY_AXIS + "s" * k) not in taken)
    names = (*reversed(mesh.names), extra)
    assert world.pre_step_check is not None
    device_mesh = world.pre_step_check.within(
        "the process groups of tied weights",
        DeviceMesh,
        world.device.type,
        ordered,
        mesh_dim_names=names,
    )
    if is_of(device_mesh):
        for name in names:
            limit_waiting(device_mesh.get_group(name))
    return device_mesh
