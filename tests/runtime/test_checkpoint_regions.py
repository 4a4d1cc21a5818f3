"""What a model wraps in `torch.utils.checkpoint` is planned, or recomputed as the model asks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autopar
from autopar.errors import ArgumentError, NotImposedWarning
from tests.runtime.workers import distance, gpt2, llama

TOLERANCE = 2e-5
SAVED = create_selective_checkpoint_contexts


def inputs() -> dict[str, Tensor]:
    ids = torch.arange(8 * 16).reshape(8, 16) * 7 % 31
    return {"input_ids": ids, "labels": ids}


def with_checkpoints(model: nn.Module, *, reentrant: bool) -> nn.Module:
    how = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)  # pyright: ignore[reportCallIssue]
    return model.train()


def again(plan: autopar.Plan) -> set[str]:
    return {key.partition(":")[0] for key in plan.structure.only.recompute}


@pytest.mark.breadth(3)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_layers_are_made_again_as_written(make: Any, reentrant: bool) -> None:
    """Dropout among them, whose masks are saved."""
    model = with_checkpoints(make(), reentrant=reentrant)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    plain, plans = copy.deepcopy(model), list[autopar.Plan]()
    for how in ("planned", "as written"):
        compiled = autopar.compile(copy.deepcopy(model), memory={"checkpoint": how})
        for which in (compiled, plain):
            torch.manual_seed(0)
            which.zero_grad()
            which(**inputs()).loss.backward()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert distance(p.grad, q.grad) <= TOLERANCE
        plans.append(compiled.plans[-1])
    planned, written = plans
    assert (
        not planned.structure.only.recompute
        and "checkpoint as written" in written.provenance.imposed
    )
    layers = {place for place in again(written) if ".*." in place or place.endswith(".*")}
    assert layers and again(written) == layers
    assert written.estimates.memory.saved < 0.2 * planned.estimates.memory.saved
    assert written.estimates.compute_ns > 1.15 * planned.estimates.compute_ns


class Stack(nn.Module):
    """Layers, some of which are wrapped, or all with a `context_fn`."""

    def __init__(self, wrapped: int, context_fn: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.wrapped, self.more = wrapped, {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            call = partial(self.run, layer)
            if k < self.wrapped:
                x = checkpoint(call, x, use_reentrant=False, **self.more)  # pyright: ignore[reportAssignmentType]
            else:
                x = call(x)
        return x.square().mean()

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).tanh().sin()


def saves_products() -> Any:
    return SAVED([torch.ops.aten.addmm.default])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Stack(2), "not kept where it is of some of several identical modules"),
        (Stack(4, saves_products), "not kept where it is of a context_fn"),
    ],
)
def test_what_is_not_kept_is_told(model: Stack, words: str) -> None:
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    with pytest.warns(NotImposedWarning, match=words):
        loss = autopar.compile(model, memory={"checkpoint": "as written"})(x)
    loss.backward()
    plain(x).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert distance(p.grad, q.grad) <= TOLERANCE


def test_it_is_read_before_anything_is_done() -> None:
    with pytest.raises(ArgumentError, match="checkpoint='kept': write one of planned, as written"):
        autopar.compile(llama(), memory={"checkpoint": "kept"})
