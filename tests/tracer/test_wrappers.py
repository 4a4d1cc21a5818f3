"""Reentrant checkpoints and what `torch.compile` made are captured as what they wrap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

Model = Callable[[], nn.Module]


class Blocks(nn.Module):
    """Layers with dropout between them, some in checkpoints."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)
        )
        self.last = nn.Linear(8, 8)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)  # pyright: ignore[reportAssignmentType]
        return self.last(x).square().mean()


class Attention(nn.Module):
    """A function of the module is compiled, as models do with flex attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = torch.compile(torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale).square().mean()


def plain_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def parts_compiled() -> nn.Module:
    model = plain_blocks()
    model[0] = torch.compile(model[0])  # pyright: ignore[reportIndexIssue]
    return nn.Sequential(model, Attention())


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(plain_blocks(), Attention())
    model[0].compile()
    model.compile()
    return model


def compare(ours: nn.Module, theirs: nn.Module, **inputs: Tensor) -> None:
    """One step of both, from the same random numbers."""
    found: list[Any] = []
    for model in (autopar.compile(ours), theirs):
        torch.manual_seed(1)
        result = model(*inputs.values()) if "x" in inputs else model(**inputs).loss
        result.backward()
        found.append((result.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (loss, grads), (expected, others) = found
    torch.testing.assert_close(loss, expected)
    assert grads.keys() == others.keys()
    for name, grad in grads.items():
        if others[name] is None:
            assert grad is None or not grad.any(), name
        else:
            torch.testing.assert_close(grad, others[name], msg=name)


def test_reentrant_checkpoints_have_eagers_gradients_and_masks() -> None:
    torch.manual_seed(0)
    model = Blocks()
    compare(copy.deepcopy(model), model, x=torch.randn(4, 8))
    assert "apply" not in vars(CheckpointFunction)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_without_a_graded_input_has_no_gradients() -> None:
    torch.manual_seed(0)
    model = Blocks(frozen=True)
    compare(copy.deepcopy(model), model, x=torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_of_transformers() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    ids = torch.randint(0, 32, (2, 8))
    compare(copy.deepcopy(model), model, input_ids=ids, labels=ids)


@pytest.mark.parametrize("make", [parts_compiled, compiled_in_place])
def test_what_torch_compile_made_is_captured(make: Model) -> None:
    torch.manual_seed(0)
    ours = make()
    theirs = nn.Sequential(plain_blocks(), Attention())
    theirs.load_state_dict(
        {name.replace("_orig_mod.", ""): value for name, value in ours.state_dict().items()}
    )
    names = list(ours.state_dict())
    torch.manual_seed(1)
    x = torch.randn(4, 8)
    with torch.compiler.set_stance("force_eager"):
        expected = theirs(x)
    compiled = autopar.compile(ours)
    torch.testing.assert_close(compiled(x), expected)
    assert list(compiled.state_dict()) == names


def test_a_model_from_torch_compile_is_unwrapped() -> None:
    model = plain_blocks()
    optimized: Any = torch.compile(model)
    compiled = autopar.compile(optimized)
    assert list(compiled.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(compiled(torch.ones(2, 8)), model(torch.ones(2, 8)))
    autopar.plan(optimized, torch.ones(4, 8), cluster="2xcpu")
