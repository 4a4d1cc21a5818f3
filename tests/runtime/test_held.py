"""Tensors that a forward finds in the model or around it, and that are no parameters of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from tests.runtime.spawn import spawn

SHARED = [torch.ones(4, requires_grad=True)]


class Scaled(nn.Module):
    """A linear layer, times what `find` gives for it."""

    def __init__(self, find: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.line, self.find = nn.Linear(4, 4), find
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return (self.line(x) * self.find(self)).square().mean()


def attribute() -> nn.Module:
    model = Scaled(lambda m: m.kept)
    model.kept = torch.ones(4, requires_grad=True)
    return model


def buffer() -> nn.Module:
    model = Scaled(lambda m: m.given)
    model.register_buffer("given", torch.ones(4, requires_grad=True))
    return model


def computed() -> nn.Module:
    """As a hypernetwork does."""
    model = Scaled(lambda m: m.kept)
    model.kept = nn.Linear(2, 4)(torch.ones(2))
    return model


def listed() -> nn.Module:
    model = Scaled(lambda m: m.kept[0])
    model.kept = [torch.ones(4, requires_grad=True)]
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (attribute, "kept"), (buffer, "given"), (computed, "kept"),
        (listed, r"a tensor of shape \(4,\)"),
        (lambda: Scaled(lambda _: SHARED[0]), r"a tensor of shape \(4,\)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_gradient_that_would_be_lost_is_told(make: Callable[[], nn.Module], name: str) -> None:
    told = rf"forward reads {name}, which requires a gradient and is no parameter .*nn.Parameter"
    with pytest.raises(TraceError, match=told):
        autopar.compile(make())(torch.ones(2, 4))


@pytest.mark.parametrize("make", [attribute, buffer, computed])
def test_what_is_detached_is_read(make: Callable[[], nn.Module]) -> None:
    model: Any = make()
    name = "given" if make is buffer else "kept"
    setattr(model, name, getattr(model, name).detach())
    x = torch.ones(2, 4)
    expected = model(x)
    torch.testing.assert_close(autopar.compile(model)(x), expected)


def test_other_weights_for_a_call_are_refused() -> None:
    model: Any = autopar.compile(Scaled(lambda _: torch.ones(4)))
    weights = {"line.weight": torch.randn(4, 4, requires_grad=True)}
    with pytest.raises(TraceError, match=r"reads line.weight, .*functional_call .*unsharded"):
        torch.func.functional_call(model, weights, (torch.ones(2, 4),))


@pytest.mark.processes
def test_what_is_found_is_that_of_rank_0() -> None:
    for rank in spawn("tests.runtime.held_workers.held", 2):
        assert isinstance(rank, dict)
        assert max(*rank["free"], *rank["ddp"]) < 1e-6
        assert any("a parameter that model.parameters() does not have" in x for x in rank["told"])
