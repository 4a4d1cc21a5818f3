"""What is relied on of torch where ops on shards are taken over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.errors import AutoparError
from autopar.runtime import dtensor_private, torch_private
from autopar.runtime.process import stack_lines
from autopar.runtime.process.proven import know_composites
from autopar.runtime.program.reads_whole import storage_of_shard


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


def test_gradients_of_a_batch_are_taken_apart_and_together() -> None:
    seen: list[tuple[int, ...]] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            assert torch_private.is_batched(grad)
            rows = torch_private.rows_of_batch(grad)
            seen.append(tuple(rows.shape))
            return torch_private.as_batch(rows * 2)

    x = torch.ones(3, requires_grad=True)
    directions = torch.arange(6.0).reshape(2, 3)
    (found,) = torch.autograd.grad(Twice.apply(x), x, directions, is_grads_batched=True)
    assert seen == [(2, 3)] and torch.equal(found, directions * 2)
    assert not torch_private.is_batched(x)


def test_transforms_and_derivatives_forward_are_known() -> None:
    seen: list[bool] = []

    def noted(x: Tensor) -> Tensor:
        seen.append(torch_private.is_transforming())
        return x.sum()

    torch.func.grad(noted)(torch.ones(2))
    assert seen == [True] and not torch_private.is_transforming()
    assert not torch_private.is_forward_mode()
    with forward_ad.dual_level():
        assert torch_private.is_forward_mode()
    assert not torch_private.is_traced()
    make_fx(lambda x: seen.append(torch_private.is_traced()) or x * 2)(torch.ones(2))
    assert seen == [True, True]


def test_what_is_below_autograd_is_known() -> None:
    seen: list[bool] = []

    class Looks(torch_private.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(torch_private.is_below_autograd())
            return func(*args, **(kwargs or {}))

    with Looks():
        torch.ones(2, requires_grad=True).mul(2)
    assert all(seen) and seen and not torch_private.is_below_autograd()


def test_data_is_assigned_as_a_class_has_it() -> None:
    class Mine(Tensor):
        pass

    given: list[Tensor] = []
    torch_private.assigned_by(Mine, lambda _, value: given.append(value))
    x = torch.ones(2).as_subclass(Mine)
    x.data = torch.zeros(2)
    assert len(given) == 1 and x.data.tolist() == [1, 1]


def test_a_storage_is_a_librarys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AutoparError, match=r"no storage of the whole tensor: read x\.full_tensor"):
        storage_of_shard(torch.ones(2), in_shards=True)
    assert storage_of_shard(torch.ones(2), in_shards=False).nbytes() == 8
    monkeypatch.setattr(stack_lines, "_STORAGES", stack_lines._STORAGES | {__file__})
    storage_of_shard(torch.ones(2), in_shards=True)  # called by pytest, which is installed
