"""What is known of the arguments of an op on parameters without a look at other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autopar.runtime.module.writes import is_simple


def test_equal_meshes_are_one() -> None:
    """Torch keeps what it has seen of ops, with the mesh that it saw first: on some ranks it is the
    one that a parameter is on, on others that of a model compiled before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, second = (DeviceMesh("cpu", torch.arange(1)) for _ in range(2))
        assert first is not second and first == second
        x, y = (distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for mesh in (first, second))
        assert is_simple((x, y), {})
        assert not is_simple((x, distribute_tensor(torch.ones(4), second, [Replicate()])), {})
    finally:
        dist.destroy_process_group()
