"""The process group of autopar's own collectives, over all ranks, and tensors sent over it as
bytes.

The default group belongs to the script, which may use it at the same time from another thread, as
`dcp.async_save` does. Collectives of two threads on one group would be matched with each other.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.dtensor_private import redistribute_as_bytes
from autopar.runtime.replacing import once
from autopar.runtime.torch_private import take_over_collective, timeout_of_world

_own: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By the default process group at the time."""


def own_group() -> dist.ProcessGroup | None:
    """autopar's group of all ranks; None, for the default group, if none was made."""
    world = dist.group.WORLD
    return None if world is None else _own.get(world)


def make_own_group() -> None:
    """Make a group like the default process group. A collective call."""
    world, group = dist.group.WORLD, dist.new_group(timeout=timeout_of_world())
    assert world is not None and isinstance(group, dist.ProcessGroup)
    _own[world] = group


def mesh_of(kind: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of `ranks`, of the own group where all ranks are in one row. A collective call."""
    group = own_group()
    if group is None or ranks.tolist() != list(range(dist.get_world_size())):
        return DeviceMesh(kind, ranks, mesh_dim_names=names)
    return DeviceMesh.from_group(group, kind, mesh=ranks, mesh_dim_names=names)


# Tensors of any dtype between ranks, where nothing is computed of them: as bytes.
#
# gloo knows no int16, no unsigned integers but uint8, and no floats of 8 bits or less ("Invalid
# scalar type"); NCCL lacks some of these as well. For data that is only moved, the dtype does not
# matter.

_UNKNOWN_TO_GLOO = frozenset(
    {
        torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
        torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    }
)  # fmt: skip

_MOVES = ("all_gather_into_tensor", "all_to_all_single", "broadcast")
"""The functional collectives that compute nothing."""


@once
def know_bytes() -> None:
    """From now on functional collectives that only move tensors, of programs and of DTensors, take
    any dtype on the CPU."""
    for name in _MOVES:
        take_over_collective(name, "CPU", _moved)
    redistribute_as_bytes({torch.float4_e2m1fn_x2})


def _moved(plain: Any, x: Tensor, *args: Any) -> Tensor:
    if x.dtype not in _UNKNOWN_TO_GLOO or not x.dim():
        return plain(x, *args)
    return unpacked(plain(bytes_behind(x), *args), x.dtype)


def bytes_behind(x: Tensor) -> Tensor:
    """`x`, contiguous, with a last dim for the bytes of an element; collectives cut or join the
    others."""
    return x.unsqueeze(-1).view(torch.uint8)


def unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `bytes_behind`."""
    return packed.view(dtype).squeeze(-1)


def broadcast(x: Tensor, src: int = 0) -> None:
    """Give `x`, plain, the values that rank `src` has. A collective call of all ranks."""
    packed = x.detach().resolve_conj().resolve_neg().contiguous()
    dist.broadcast(as_bytes(packed), src=src, group=own_group())
    if packed.data_ptr() != x.data_ptr():
        with torch.no_grad():
            x.copy_(packed)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of `x`, which is contiguous, byte by byte."""
    return x.detach().reshape(-1).view(torch.uint8)
