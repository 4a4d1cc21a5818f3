"""What is relied on of torch where ops on shards are taken over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar.runtime import dtensor_private, torch_private
from autopar.runtime.process.composites import know_composites


def test_what_dtensor_knows_is_told() -> None:
    assert dtensor_private.has_strategy(torch.ops.aten.mul.Tensor)
    assert not dtensor_private.has_strategy(torch.ops.aten._chunk_cat.default)


def test_a_dtensor_becomes_a_view_of_itself() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        op = torch.ops.aten.unsqueeze_.default
        dtensor_private.become(x, distribute_tensor(torch.arange(4.0)[None], mesh, [Shard(1)]))
        torch_private.reshape_wrapper(op, (x, 0), {})
        assert x.shape == (1, 4) and x.placements == (Shard(1),)
        assert (x * 2).full_tensor().tolist() == [[0, 2, 4, 6]]
    finally:
        dist.destroy_process_group()


def test_hooks_of_an_optimizer_are_next_to_its_step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, seen = torch.optim.SGD([weight], 0.1), list[str]()
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("script, first"))
    optimizer.register_step_post_hook(lambda *_: seen.append("script, last"))
    torch_private.step_next_to(optimizer, before, after)
    optimizer.step()
    assert seen == ["script, first", "before", "after", "script, last"]


def test_ops_that_are_composed_anew_give_what_they_gave() -> None:
    know_composites()
    x, out = torch.randn(2, 5, 5), torch.zeros(2, dtype=torch.int64)
    assert torch.linalg.matrix_rank(x, out=out) is out and out.tolist() == [5, 5]
    made = torch.zeros(2, 5, 5)
    torch.matmul(x, x[0], out=made)
    torch.testing.assert_close(made, x @ x[0])
    for at in (torch.tensor([1, 3]), torch.tensor(2)):
        numbers = at.tolist()
        pairs = zip(x.tensor_split(at, 1), x.tensor_split(numbers, 1), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
