"""Steps in microbatches of which a part is of the whole batch: what is drawn for all of it, and
what reads several samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.ir.graph import Graph
from autopar.ir.own_ops import MICROBATCH, RECEIVE
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import in_stages
from autopar.tracer import trace
from tests.grouped import grouped
from tests.planned import hostless

PIPELINES = (
    {"stages": 2, "microbatches": 4},
    {"stages": 2, "microbatches": 2, "schedule": "gpipe"},
    {"stages": 2, "microbatches": 2, "schedule": "zb-h1"},
)


class Denoiser(nn.Module):
    """Its loss reads the noise that its first layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        return functional.mse_loss(self.net(x + noise), noise)


class Whole(nn.Module):
    """Nothing that it trains is of a microbatch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), kind

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "sorted":
                x = x[x[:, 0].argsort()]
            case "half":
                x = x[:4]
            case _:
                x = x.mean(0, keepdim=True)
        return self.net(x).square().mean()


def cut(graph: Graph) -> tuple[Graph, ...]:
    microbatches = in_microbatches(graph, 2)
    start = next(
        n.index for n in microbatches.nodes if n.module == "net.2" and n.op == "aten.mm.default"
    )
    return in_stages(microbatches, [start])


def test_a_stage_is_sent_no_more_of_noise_than_a_turn_has() -> None:
    graph = trace(Denoiser(), (torch.randn(8, 8),), {}).graph
    _, second = cut(graph)
    sent = [node.outputs[0].shape for node in second.nodes if node.op == RECEIVE]
    assert sent == [(4, 8), (4, 8)]
    assert not any(node.op == MICROBATCH for node in second.nodes)


@pytest.mark.parametrize("options", PIPELINES, ids=str)
def test_a_loss_reads_the_noise_of_the_first_stage(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, inputs = Denoiser(), (torch.randn(8, 8),)
    plan = autopar.plan(model, inputs, cluster=hostless("2xH100"), **grouped(**options))
    assert len(plan.stages) == 2
    assert autopar.verify(plan, model, inputs).differences


@pytest.mark.breadth(3)
@pytest.mark.parametrize("options", [{"microbatches": 2}, PIPELINES[1]], ids=str)
@pytest.mark.parametrize("kind", ["sorted", "half", "mean"])
def test_backward_of_the_whole_batch(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, inputs = Whole(kind), (torch.randn(8, 8),)
    plan = autopar.plan(model, inputs, cluster=hostless("2xH100"), **grouped(**options))
    assert autopar.verify(plan, model, inputs).differences
    if "stages" not in options:
        compiled = autopar.compile(model, microbatches=2)
        loss = compiled(*inputs)
        loss.backward()
        expected = torch.autograd.grad(model(*inputs), list(model.parameters()))
        for param, gradient in zip(compiled.parameters(), expected, strict=True):
            assert param.grad is not None
            assert torch.allclose(param.grad, gradient, atol=1e-6)
