"""The whole way with all ranks in one process: trace, price, solve, rewrite, run, compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.runtime.simulator.spmd import train_step
from autopar.tracer import trace
from tests.layouts import program_of
from tests.planned import on_h100, plan_for

MESHES = ["2", "4", "2x2", "2x4"]


class Regression(nn.Module):
    """Biased layers under a squared error."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y, reduction=self.reduction)


def worst_error(
    model: nn.Module, inputs: dict[str, Any], mesh: str, pins: dict[str, str], loss: Callable
) -> float:
    """The largest relative difference to eager, over the loss and every gradient, of the plan with
    the decisions `pins`."""
    traced = trace(model, (), inputs)
    plan = plan_for(traced.graph, mesh, pins)
    program = program_of(traced, plan.structure.only)
    tensors = {f"param:{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"buffer:{name}": b for name, b in model.named_buffers()}
    names = [name for name in traced.inputs if name.startswith("input:")]
    tensors |= dict(zip(names, inputs.values(), strict=True))
    torch.manual_seed(7)
    expected = loss(model(**inputs))
    expected.backward()
    torch.manual_seed(7)
    found = train_step(program, on_h100(mesh)[1], traced.graph, plan.structure.only, tensors)
    (result,) = (v for k, v in found.outputs.items() if k.startswith("loss:"))
    pairs = [(result, expected.detach())]
    pairs += [(found.gradients[n], p.grad) for n, p in model.named_parameters()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_squared_errors_of_a_sharded_batch(mesh: str, reduction: str) -> None:
    torch.manual_seed(0)
    model = Regression(reduction).double()
    inputs = {"x": torch.randn(24, 8).double(), "y": torch.randn(24, 8).double()}
    over = "m" if "x" not in mesh else "m,k"
    pins = {r"layers\.\*:forward:mm\.0~1": over}
    assert worst_error(model, inputs, mesh, pins, lambda loss: loss) < 1e-12


@pytest.mark.breadth(2)
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_dropout_draws_what_one_device_draws(mesh: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    assert config.resid_pdrop > 0
    assert config.attn_pdrop > 0
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 64, (4, 8))
    over = "m.0" if mesh == "2" else "m.0,n"
    pins = {r"transformer\.h\.\*\.mlp\.c_fc:forward:mm\.0": over}
    inputs = {"input_ids": ids, "labels": ids}
    assert worst_error(model, inputs, mesh, pins, lambda output: output.loss) < 1e-5
