"""Counts of floating-point operations, against torch's own counter of an eager step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.rules.work import flops, is_contraction
from autopar.tracer import trace


class Loss(nn.Module):
    """The mean of what `body` makes of x."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


class Grouped(nn.Module):
    """Rows sorted by group, times the matrix of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.reshape(3, -1, 8), self.weight)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "products": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False)), (5, 8)),
    "batches of products": (Grouped, (12, 8)),
    "strides": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 3)),
        (2, 3, 12, 12),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, 2)),
        (2, 3, 5, 7),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_contractions_count_as_torch_counts_them(case: str) -> None:
    build, shape = CASES[case]
    model, x = Loss(build()), torch.ones(shape)
    graph = trace(model, (x,)).graph
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    ours = sum(flops(node, graph) for node in graph.nodes if is_contraction(node.op))
    assert ours == counter.get_total_flops() > 0


def test_channels_in_groups_do_the_work_of_one_group_each() -> None:
    """torch's counter takes the gradient of a grouped weight for that of a whole one."""
    model = Loss(nn.Conv1d(4, 8, 3, groups=2))
    graph = trace(model, (torch.ones(2, 4, 9),)).graph
    found = {node.op: flops(node, graph) for node in graph.nodes if is_contraction(node.op)}
    product = 2 * (2 * 7) * (8 * 2 * 3)
    assert found == {
        "aten.convolution.default": product,
        "aten.convolution_backward.default": product,
    }
