"""Which processes there are, which device this one runs on, and the groups of a mesh.

The device of a run is that of the cluster or plan if one is given. Otherwise it is CUDA if there is
a CUDA device, and else the CPU. A model on the CPU is moved, so that one script serves every
machine; `cluster="1xcpu"` keeps it on the CPU. Under torchrun each process takes the device of its
LOCAL_RANK. A process group that exists already is used as it is: one without NCCL runs on the CPU.

Ranks exchange which of them share a node as they join (`hosts`). `look`, which does not join, uses
the launcher's figures.
"""

from __future__ import annotations

import atexit
import itertools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, default_pg_timeout
from torch.distributed.tensor import placement_types

from autopar.cluster.devices import DEVICES, preset_of
from autopar.errors import ClusterError, PlanError, RankError
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.sharding import Sharding
from autopar.ir.units import format_bytes
from autopar.runtime.dtensor_private import is_of, mesh_of_others
from autopar.runtime.process.agreement import Agreement
from autopar.runtime.process.hosts import (
    RankHost,
    check_blocks,
    local_rank,
    local_size_from,
    ranks_per_node,
)
from autopar.runtime.process.own_group import make_own_group, mesh_of
from autopar.runtime.process.pre_step_check import SLACK_S, PreStepCheck
from autopar.runtime.process.rank_registry import RankLocation, RankRegistry, guilty, keeper_of
from autopar.runtime.process.waits import BoundedStore, in_time
from autopar.runtime.torch_private import (
    default_store,
    gloo_of_world,
    limit_waiting,
    store_of_its_own,
    timeout_of_world,
)

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train together, and the place of this one among them."""

    rank: int
    size: int
    device: torch.device
    store: BoundedStore | None = None
    device_mesh: DeviceMesh | None = None
    """All ranks in one axis; None for a world of one."""
    pre_step_check: PreStepCheck | None = None
    """The check of all ranks at the start of each call; None for a world of one."""

    @property
    def cluster(self) -> str:
        """The devices of all ranks as `cluster.parsing.parse_cluster` reads them: `4xcpu`,
        `2x8xH100`. ClusterError if autopar does not know the device, or nodes are not known."""
        preset, local_size = self.preset, self.local_size
        if local_size is None:
            raise ClusterError(
                f"which of the {self.size} ranks share a node is not known, since the launcher "
                f'sets no LOCAL_WORLD_SIZE: pass cluster=, for example "{self.size}x{preset}" for '
                "one node"
            )
        num_nodes, rest = divmod(self.size, local_size)
        if rest:
            raise ClusterError(
                f"the launcher says that {local_size} ranks share a node, and {self.size} ranks "
                f'are no multiple of that: pass cluster=, for example "{self.size}x{preset}"'
            )
        nodes = f"{num_nodes}x" if num_nodes > 1 else ""
        return f"{nodes}{local_size}x{preset}"

    @property
    def preset(self) -> str:
        """The preset of this rank's device in `cluster.devices`. ClusterError if there is none."""
        return "cpu" if self.device.type == "cpu" else _cuda_preset(self.device)

    @property
    def has_host_backend(self) -> bool:
        """Whether ranks can reduce tensors in the host's memory, as norms of gradients are."""
        return not dist.is_initialized() or "cpu" in dist.get_backend_config()

    @property
    def local_size(self) -> int | None:
        """How many ranks share a node, by the ranks' hosts once they have joined, or by the
        launcher; None if neither is known. ClusterError if nodes differ in size."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is not None and group in _pre_step_checks:
            return ranks_per_node(_pre_step_checks[group].registry.hosts)
        return local_size_from(os.environ, self.size) if self.size > 1 else 1

    def check_nodes(self, cluster: Cluster) -> None:
        """ClusterError if the nodes of `cluster` lie across the hosts of the ranks."""
        if self.pre_step_check is not None and len(cluster.levels) > 1:
            size = cluster.num_devices // cluster.levels[0].size
            check_blocks(self.pre_step_check.registry.hosts, size, cluster.name)

    def working(self, phase: str) -> AbstractContextManager[None]:
        """`PreStepCheck.working`; for a world of one nothing."""
        return nullcontext() if self.pre_step_check is None else self.pre_step_check.working(phase)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters lie: the CPU if that is nowhere yet."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def place_of_process() -> tuple[int, int]:
    """(rank, world size), as the process group or torchrun's environment say."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if all(name in os.environ for name in _TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def look(model_device: torch.device, kind: str | None = None) -> World:
    """The world by the environment, without joining it.

    `kind` is "cpu" or "cuda" if a cluster or a plan names it. ClusterError if there is no such
    device here.
    """
    rank, size = place_of_process()
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        kind = "cpu"
    return World(rank, size, _device(model_device, kind, rank, size))


def join(model_device: torch.device, kind: str | None = None) -> World:
    """The world, with its process group made if there is none yet (gloo; NCCL for CUDA). RankError
    if a rank does not come."""
    world = look(model_device, kind)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size == 1:
        return world
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        limit_s = 2 * default_pg_timeout.total_seconds()  # To meet, and to connect.
        in_time(limit_s, "the process group", dist.init_process_group, backend)
        atexit.register(_leave)
    pre_step_check = _pre_step_check(world)
    device_mesh = mesh_of(world.device.type, torch.arange(world.size), ("world",))
    return replace(
        world, store=pre_step_check.store, device_mesh=device_mesh, pre_step_check=pre_step_check
    )


_SERIAL = itertools.count()
_pre_step_checks: WeakKeyDictionary[dist.ProcessGroup, PreStepCheck] = WeakKeyDictionary()
"""By the default process group that they were made for."""


def _pre_step_check(world: World) -> PreStepCheck:
    """That of the default process group. A collective call."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _pre_step_checks:
        _pre_step_checks[group] = _first_pre_step_check(world.rank, world.size, world.device)
    return _pre_step_checks[group]


def _first_pre_step_check(rank: int, size: int, device: torch.device) -> PreStepCheck:
    """The check of all ranks, which join the registry and exchange their hosts."""
    timeout_s = timeout_of_world().total_seconds()
    keeper = keeper_of(default_store())
    name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/start{next(_SERIAL)}"
    registry: RankRegistry | None = None
    awaited = "the Store"
    try:
        # This fails at once if the Store is gone; connections are tried until time is up.
        BoundedStore(default_store(), timeout_s).check([name])
        # Connections of their own, since a wait over one delays all its users.
        store, second = (in_time(timeout_s + SLACK_S, awaited, store_of_its_own) for _ in range(2))
        bounded = BoundedStore(store, timeout_s)
        registry_store = BoundedStore(PrefixStore(f"autopar/roll/{name}", second), timeout_s)
        registry = RankRegistry(registry_store, rank, size, keeper=keeper)
        agreement = Agreement(bounded, registry, name=name)
        agreement.agree("the first compiled model", {})
        hosts = agreement.share("hosts", lambda: msgspec.json.encode(registry.all_hosts()))
        registry.hosts = msgspec.json.decode(hosts, type=list[RankHost])
        awaited = "a process group of all ranks"
        group = in_time(timeout_s + SLACK_S, awaited, gloo_of_world)
        in_time(timeout_s + SLACK_S, awaited, make_own_group)
    except RuntimeError as error:
        keeper_silent = [RankLocation(0, who=keeper.name or "the Store")]
        reason = guilty(keeper_silent if registry is None else registry.call())
        raise RankError(f"rank {rank} waited for {awaited}, and {reason}") from error
    return PreStepCheck(group, bounded, registry, device, name)


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of a plan's mesh.

    `params` lists the axes reversed, fastest first: an atom of a parameter is cut by the fastest
    axis first, which is DTensor's left-to-right rule there. `others` lists them in mesh order, for
    tensors whose atoms are cut by the slowest axis first.
    """

    mesh: Mesh
    params: DeviceMesh
    others: DeviceMesh

    @property
    def names(self) -> dict[str, str]:
        """Per axis, the name of the process group of this rank on it."""
        return {axis.name: self.params.get_group(axis.name).group_name for axis in self.mesh}

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Where this rank sits, in mesh order."""
        return tuple(self.others.get_local_rank(axis.name) for axis in self.mesh)

    def stored(self, sharding: Sharding) -> ParamPlace:
        """Where a parameter lies that is in `sharding`."""
        # Of a mesh of one device, which has no axis, the DeviceMesh has one.
        return ParamPlace(self.params, param_placements(sharding) or (placement_types.Replicate(),))


class ParamPlace(NamedTuple):
    """Where a parameter lies: DTensor's placements on a mesh."""

    mesh: DeviceMesh
    placements: tuple[placement_types.Placement, ...]


def make_groups(mesh: Mesh, world: World, first_rank: int = 0) -> Groups:
    """The process groups of a mesh over the ranks of `world` from `first_rank` on. A collective
    call of all ranks.

    DeviceMesh gives groups a timeout of their own: these take that of the world."""
    assert world.pre_step_check is not None
    names, kind = mesh.names or ("device",), world.device.type
    ranks = torch.arange(first_rank, first_rank + mesh.num_devices).reshape(mesh.sizes or (1,))
    what = f"the process groups of mesh {mesh.text}"
    others = world.pre_step_check.within(what, mesh_of, kind, ranks, names)
    is_here = is_of(others)
    for name in names if is_here else ():
        limit_waiting(others.get_group(name))
    fastest_first = tuple(reversed(names))
    if len(names) == 1:
        return Groups(mesh, others, others)
    reordered = ranks.permute(tuple(reversed(range(len(names))))).contiguous()
    if not is_here:
        return Groups(mesh, mesh_of_others(kind, reordered, fastest_first), others)
    params = DeviceMesh.from_group(
        [others.get_group(name) for name in fastest_first],
        kind,
        mesh=reordered,
        mesh_dim_names=fastest_first,
    )
    return Groups(mesh, params, others)


def dtensor_placements(sharding: Sharding) -> tuple[placement_types.Placement, ...]:
    """DTensor's placements of `sharding`, in its order of axes. PlanError if it is partial."""
    if sharding.has_partial:
        raise PlanError(f"{sharding} is partial: no tensor is stored so; plan again")
    return tuple(
        placement_types.Shard(p.dim) if p.kind in "SC" else placement_types.Replicate()
        for p in sharding
    )


def param_placements(sharding: Sharding) -> tuple[placement_types.Placement, ...]:
    """`dtensor_placements` in the order of `Groups.params`."""
    return tuple(reversed(dtensor_placements(sharding)))


def _device(model_device: torch.device, kind: str | None, rank: int, size: int) -> torch.device:
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise ClusterError(
            "the plan is for CUDA devices and there is none here: plan for CPUs, for example with "
            f'cluster="{size}xcpu"'
        )
    if kind == "cpu" or not available:
        return torch.device("cpu")
    if size == 1:
        index = model_device.index if model_device.type == "cuda" else torch.cuda.current_device()
        return torch.device("cuda", index or 0)
    num_devices = torch.cuda.device_count()
    place = local_rank(os.environ, rank, num_devices)
    if place >= num_devices:
        raise ClusterError(
            f"this is process {place} of its machine, which has {num_devices} CUDA devices: "
            "start at most one process per device"
        )
    return torch.device("cuda", place)


def _cuda_preset(device: torch.device) -> str:
    """The preset with the device's name and memory."""
    name = torch.cuda.get_device_name(device)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    preset = preset_of(name, memory_bytes)
    if preset is not None:
        return preset
    raise ClusterError(
        f"{name} with {format_bytes(memory_bytes)} is none of the devices that autopar knows "
        f"({', '.join(sorted(DEVICES))}): describe it in a TOML file and pass it as cluster="
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
