"""The process group of all ranks that autopar's collectives go over.

The default one belongs to the script, which may use it at the same time from another thread, as
`dcp.async_save` does: collectives of two threads on one group meet each other's.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.torch_private import timeout_of_world

_own: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By the default process group that they were made beside."""


def own_group() -> dist.ProcessGroup | None:
    """That of all ranks; None, which is the default one, where none was made."""
    world = dist.group.WORLD
    return None if world is None else _own.get(world)


def make_own_group() -> None:
    """Make one like the default process group. A collective call."""
    world, made = dist.group.WORLD, dist.new_group(timeout=timeout_of_world())
    assert world is not None and isinstance(made, dist.ProcessGroup)
    _own[world] = made


def mesh_of(kind: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of `ranks`, of the own group where all ranks are in one row. A collective call."""
    group = own_group()
    if group is None or ranks.tolist() != list(range(dist.get_world_size())):
        return DeviceMesh(kind, ranks, mesh_dim_names=names)
    return DeviceMesh.from_group(group, kind, mesh=ranks, mesh_dim_names=names)
