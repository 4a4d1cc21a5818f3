"""What forward sets on its model is as in eager, and what it leaves there is an error where it is
used."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, SideEffectWarning, TraceError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
OUTSIDE: dict[str, Tensor] = {}
CALLS, MICROBATCH, IN_A_DICT, COUNTED = 0, 0, {"turn": 0}, {"calls": 0}


class Counts(nn.Module):
    """Has two layers, of which a counter chooses, and is made ready by its first call."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.microbatch, self.seen, self.is_ready, self.last = 0, 10, False, "none"
        self.state = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen - 2
        y = self.layers[self.microbatch % 2](x)
        self.microbatch = (self.microbatch + 1) % 2
        if not self.is_ready:
            y = y * 2
            self.is_ready = True
        self.last = "trained" if self.training else "evaluated"
        self.state = self.state * 0.9 + y.detach().mean(0)
        return y.square().mean()


def numbers(model: Any) -> tuple[Any, ...]:
    return model.calls, model.microbatch, model.seen, model.is_ready, model.last


@pytest.mark.filterwarnings("error::autopar.errors.SideEffectWarning")
def test_numbers_that_forward_sets_are_those_of_eager() -> None:
    plain, model = Counts(), autopar.compile(Counts(), search={"strict": True})
    for step in range(8):
        if step == 5:
            plain.eval(), model.eval()
        if step == 6:
            plain.calls = model.calls = 40
            plain.microbatch = model.microbatch = 0
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


class CountsAround(nn.Module):
    """The same, with counters that are no attributes: those that choose, or only count."""

    of_all = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.where, self.listed, self.named = where, [0, 7], {"calls": 0}
        microbatch = 0

        def closed_over() -> int:
            nonlocal microbatch
            microbatch += 1
            return microbatch

        self.closed_over = closed_over

    def forward(self, x: Tensor) -> Tensor:
        global CALLS, MICROBATCH
        CALLS += 1
        COUNTED["calls"] += 2
        CountsAround.of_all += 1
        self.named["calls"] += 1
        match self.where:
            case "a global":
                MICROBATCH = MICROBATCH + 1
                microbatch = MICROBATCH
            case "a dict":
                IN_A_DICT["turn"] = (IN_A_DICT["turn"] + 1) % 2
                microbatch = IN_A_DICT["turn"]
            case "a list":
                self.listed[0] = 1 - self.listed[0]
                microbatch = self.listed[0]
            case _:
                microbatch = self.closed_over()
        return self.layers[microbatch % 2](x).square().mean()


def around(model: Any) -> tuple[Any, ...]:
    """All counters, as they are; they begin anew."""
    global CALLS, MICROBATCH
    of_model = model.listed, dict(model.named)
    found = CALLS, MICROBATCH, dict(IN_A_DICT), dict(COUNTED), CountsAround.of_all, of_model
    CALLS = MICROBATCH = CountsAround.of_all = IN_A_DICT["turn"] = COUNTED["calls"] = 0
    return found


@pytest.mark.filterwarnings("error::autopar.errors.SideEffectWarning")
@pytest.mark.parametrize("where", ["a global", "a dict", "a list", "a closure"])
def test_counters_around_the_model_are_those_of_eager(where: str) -> None:
    plain, model = (
        CountsAround(where),
        autopar.compile(CountsAround(where), search={"strict": True}),
    )
    around(plain)
    expected = [plain(X) for _ in range(5)]
    counted = around(plain)
    for wanted in expected:
        torch.testing.assert_close(model(X), wanted)
    assert around(model) == counted
    # Where a number is not bound, each of its values is one.
    assert len(model.plans) == (2 if where in ("a dict", "a list") else 5)


def test_counters_of_blocks_that_repeat_are_those_of_all() -> None:
    """A part of them is traced, and the others are copies."""

    class CountingBlock(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            COUNTED["calls"] += 1
            return super().forward(input).tanh()

    around(CountsAround(""))
    model = autopar.compile(
        nn.Sequential(*(CountingBlock(4, 4) for _ in range(8))), search={"strict": True}
    )
    model(X), model(X)
    assert COUNTED["calls"] == 16 and len(model.plans) == 1


def test_what_is_something_else_each_time_is_named() -> None:
    class Times(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            global CALLS
            CALLS = time.perf_counter_ns()
            return super().forward(input)

    with pytest.raises(TraceError, match=r"sets CALLS of .* to something else each time"):
        autopar.compile(Times(4, 4), search={"strict": True})(X)
    around(CountsAround(""))
    model = autopar.compile(Times(4, 4))
    with pytest.warns(SideEffectWarning, match="something else each time"):
        model(X)
    model(X)
    assert CALLS == 0 and len(model.plans) == 1


def test_counters_are_those_of_one_call_however_often_a_model_is_traced() -> None:
    """Blocks that repeat are recorded before, and what a trace finds may make another one."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.scale: Any = [torch.ones(4, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            COUNTED["calls"] += 1
            for block in self.blocks:
                x = block(x) * self.scale[0]
            return x.sum()

    around(CountsAround(""))
    model = autopar.compile(Blocks())
    model(X).backward()
    assert COUNTED["calls"] == 1
    model(X).backward()
    assert COUNTED["calls"] == 2 and len(model.plans) == 1


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
