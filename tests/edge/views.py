"""What is written through views of results under autograd: processes of `test_views.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from autopar.runtime.dtensor_private import cut_shard, dtensor_of
from autopar.runtime.program.sharded import whole_of
from tests.edge.calls import in_shards
from tests.edge.process import meshes_of_world


def _row(y: Tensor) -> None:
    y[0] = 0


def _column(y: Tensor) -> None:
    y[:, 1] += 3


def _by_index(y: Tensor) -> None:
    y[torch.arange(3)] *= 2


def _by_mask(y: Tensor) -> None:
    y[y > 0] = 0.5


def _view_of_view(y: Tensor) -> None:
    y.view(-1)[3:7].zero_()


def _transposed(y: Tensor) -> None:
    y.t()[1].fill_(2.0)


def _later(y: Tensor) -> None:
    row = y[2]
    y.mul_(2)
    row.mul_(5)


def _unsqueezed(y: Tensor) -> None:
    y.unsqueeze_(0)
    y[0, 1].mul_(3)


def _turned(y: Tensor) -> None:
    y.transpose_(0, 1)
    y[0].mul_(3)


WRITES: tuple[Callable[[Tensor], None], ...] = (
    _row, _column, _by_index, _by_mask, _view_of_view, _transposed, _later, _unsqueezed, _turned,
)  # fmt: skip


def _loss(write: Callable[[Tensor], None], x: Tensor) -> Tensor:
    y = x * 2
    write(y)
    slope = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
    return (y.square() * slope).sum()


def written() -> dict[str, float]:
    """How far loss and gradient are from those of whole tensors."""
    dist.init_process_group("gloo")
    mesh: DeviceMesh = meshes_of_world().world
    torch.manual_seed(0)
    values, seen = torch.randn(6, 4, dtype=torch.float64), dict[str, float]()
    for write in WRITES:
        for dim in (0, 1):
            eager = values.clone().requires_grad_()
            expected = _loss(write, eager)
            expected.backward()
            placements = (Shard(dim),)
            piece = cut_shard(values, mesh, placements).clone()
            parameter = dtensor_of(piece, values, mesh, placements).requires_grad_()
            leaf = values.clone().requires_grad_()
            given = {"parameter": (parameter, parameter), "output": (leaf, None)}
            for kind, (held, found) in given.items():
                x = in_shards(leaf, mesh, placements) if found is None else found
                loss = _loss(write, x)
                loss.backward()
                assert held.grad is not None and eager.grad is not None
                off = [whole_of(loss) - expected, whole_of(held.grad) - eager.grad]
                name = f"{write.__name__} of {kind} cut by {dim}"
                seen[name] = max(float(each.detach().abs().max()) for each in off)
    dist.destroy_process_group()
    return seen
