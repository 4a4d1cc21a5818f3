"""What forward sets on its model is as in eager, and what it leaves there is an error where it is
used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, SideEffectWarning

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
OUTSIDE: dict[str, Tensor] = {}


class Counts(nn.Module):
    """Has two layers, of which a counter chooses, and is made ready by its first call."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.turn, self.seen, self.is_ready, self.last = 0, 10, False, "none"
        self.state = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen - 2
        y = self.layers[self.turn % 2](x)
        self.turn = (self.turn + 1) % 2
        if not self.is_ready:
            y = y * 2
            self.is_ready = True
        self.last = "trained" if self.training else "evaluated"
        self.state = self.state * 0.9 + y.detach().mean(0)
        return y.square().mean()


def numbers(model: Any) -> tuple[Any, ...]:
    return model.calls, model.turn, model.seen, model.is_ready, model.last


@pytest.mark.filterwarnings("error::autopar.errors.SideEffectWarning")
def test_numbers_that_forward_sets_are_those_of_eager() -> None:
    plain, model = Counts(), autopar.compile(Counts(), strict=True)
    for step in range(8):
        if step == 5:
            plain.eval(), model.eval()
        if step == 6:
            plain.calls = model.calls = 40
            plain.turn = model.turn = 0
        torch.testing.assert_close(model(X), plain(X))
        assert numbers(model) == numbers(plain)
        torch.testing.assert_close(model.state, plain.state)
    # Not ready; each turn in training; those in evaluation. What only counts makes none.
    assert len(model.plans) == 5


class Alternates(nn.Module):
    """One layer or the other, with a loss beside an output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 0
        self.left: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers[self.calls % 2](x)
        self.calls += 1
        self.left = y
        return y.square().mean(), y


@pytest.mark.filterwarnings("ignore:forward leaves tensors in left")
def test_a_backward_through_an_output_is_that_of_the_call_before_a_counter_went_on() -> None:
    """The forward that it takes again, with the gradient of the output, counts nothing."""
    plain = Alternates()
    model: Any = autopar.compile(copy.deepcopy(plain))
    for step in range(4):
        for each in (model, plain):
            torch.manual_seed(step)
            loss, y = each(torch.randn(3, 4))
            (loss + y.exp().mean()).backward()
        assert model.calls == plain.calls == step + 1
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(AutoparError, match="is a tensor that forward left there"):
        model.left.sum()


class OnlyCounts(nn.Module):
    """Reads what it counts for nothing else."""

    calls = 0
    part = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.line, self.rest = nn.Linear(4, 4), 10

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rest = self.rest - 3
        self.part += 0.25
        return self.line(x).sum()


@pytest.mark.filterwarnings("error::autopar.errors.SideEffectWarning")
def test_counters_that_begin_with_the_class_go_on() -> None:
    plain, model = OnlyCounts(), autopar.compile(OnlyCounts())
    for _ in range(4):
        plain(X), model(X)
        found = (model.calls, model.rest, model.part)
        assert found == (plain.calls, plain.rest, plain.part)
    del model.calls, plain.calls
    plain(X), model(X)
    assert model.calls == plain.calls == 1


class Leaves(nn.Module):
    """Leaves what it computes where forward is over."""

    aux: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(4, 4)
        self.feats: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(4.0).cos()
        y = self.line(x) * self.cache
        self.aux = y.abs().mean()
        self.feats.append(y)
        self.named["y"] = y
        OUTSIDE["y"] = y
        return y.square().mean()


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "added": lambda m, loss: loss + m.aux,
    "multiplied": lambda m, loss: m.aux * 2,
    "item": lambda m, loss: m.aux.item(),
    "text": lambda m, loss: f"{m.aux:.3f}",
    "shape": lambda m, loss: m.aux.shape,
    "truth": lambda m, loss: bool(m.aux > 1),
    "list": lambda m, loss: m.feats[0].mean(),
    "stacked": lambda m, loss: torch.stack(m.feats),
    "dict": lambda m, loss: float(m.named["y"].sum()),
    "global": lambda m, loss: OUTSIDE["y"].sum(),
    "detached": lambda m, loss: m.aux.detach(),
}


@pytest.mark.parametrize("use", USES)
def test_tensors_that_forward_leaves_are_errors_where_they_are_used(use: str) -> None:
    expected = Leaves()(X)
    OUTSIDE.clear()
    model = autopar.compile(Leaves())
    feats = model.feats
    with (
        pytest.warns(SideEffectWarning, match="forward leaves tensors in feats .*only forward has"),
        pytest.warns(SideEffectWarning, match="keeps a tensor in cache .*computes it anew"),
    ):
        loss = model(X)
    assert feats is model.feats and len(feats) == 1
    with pytest.raises(AutoparError, match=r"is a tensor that forward left there.*return loss"):
        USES[use](model, loss)
    for _ in range(2):
        torch.testing.assert_close(model(X), expected)
    assert len(model.plans) == 1
    assert model.cache is None


@pytest.mark.filterwarnings("ignore::autopar.errors.SideEffectWarning")
def test_what_a_script_puts_there_stays() -> None:
    OUTSIDE.clear()
    model = autopar.compile(Leaves())
    model(X)
    assert "only forward has" in repr(model.aux)
    model.aux = 3.0
    model.feats.clear()
    assert model.aux == 3.0 and not model.feats
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), model(X))
    assert "only forward has" in repr(pickle.loads(pickle.dumps(model.named["y"])))
