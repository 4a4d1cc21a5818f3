"""Parameters that forward changes in place: their new values leave the program in shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import Role
from autopar.tracer import trace
from tests.zoo.table import _verify

Change = Callable[["Changing", Tensor], None]


class Changing(nn.Module):
    def __init__(self, change: Change, late: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.change, self.late = change, late
        self.line, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        if tied:
            self.up.weight = self.line.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.late:
            self.change(self, x)
        x = self.line(x)
        if self.late:
            self.change(self, x)
        return x.square().sum()


def halve(model: Changing, _x: Tensor) -> None:
    model.line.weight.data.mul_(0.5)


def clamp(model: Changing, _x: Tensor) -> None:
    with torch.no_grad():
        model.line.weight.clamp_(-0.1, 0.1)


def of_batch(model: Changing, x: Tensor) -> None:
    model.line.weight.detach()[0].copy_(x.detach().mean(0))


def set_data(model: Changing, _x: Tensor) -> None:
    model.line.weight.data = model.line.weight.data.clamp(-0.1, 0.1)


def seen_by_autograd(model: Changing, _x: Tensor) -> None:
    model.line.weight.clamp_(-0.1, 0.1)


def other_shape(model: Changing, _x: Tensor) -> None:
    model.line.weight.data = model.line.weight.data[:4]


MODELS = {
    "data": Changing(halve),
    "after it was read": Changing(halve, late=True),
    "without gradients": Changing(clamp),
    "tied": Changing(halve, tied=True),
    "from the batch": Changing(of_batch),
    "data set": Changing(set_data),
}


@pytest.mark.parametrize("how", MODELS)
def test_the_new_value_and_gradients_are_those_of_eager(how: str) -> None:
    """On four simulated ranks, where the parameter is in shards."""
    model, x = MODELS[how].double(), torch.randn(8, 8).double()
    before = model.line.weight.detach().clone()
    report = _verify(model, (x,), {}, lambda _: None)
    assert not report.failed
    assert "parameter line.weight" in {d.name for d in report.differences}
    assert torch.equal(model.line.weight, before)


def test_a_change_in_every_block_of_many() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.weight.data.clamp_(-0.2, 0.2)
                x = block(x).tanh()
            return x.square().sum()

    model, x = Deep().double(), torch.randn(8, 8).double()
    assert len(trace(model, (x,)).graph.with_role(Role.UPDATE)) == 8
    assert not _verify(model, (x,), {}, lambda _: None).failed


def test_a_parameter_that_needs_no_gradient() -> None:
    model = Changing(halve).double()
    model.line.weight.requires_grad_(False)
    assert not _verify(model, (torch.randn(8, 8).double(),), {}, lambda _: None).failed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (seen_by_autograd, r"line.weight in place while gradients are on"),
        (other_shape, "by setting its data"),
    ],
)
def test_what_is_not_sound_is_refused(change: Change, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        trace(Changing(change), (torch.randn(8, 8),))
