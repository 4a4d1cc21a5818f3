"""A program is run only while all that its trace read is as it was: each change of the model, of
what its code reads, or of an argument gives what eager gives."""

from __future__ import annotations

import enum
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import GuardError, ManyProgramsWarning, SideEffectWarning, TraceError

SCALE: Any = 2.0
TABLE = {"shift": 0.5}


class Kind(enum.Enum):
    PLUS = 1
    MINUS = -1


class Options:
    """An object that nothing can look into from outside."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Head(nn.Module):
    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.tau = 1.0
        self.mask = torch.ones(4)
        self.options = {"bias": [0.25]}
        self.table = np.ones(4, dtype=np.float32)

    def forward(self, x: Tensor, act: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
        h = act(self.drop(self.linear(x))) * self.tau * self.mask + self.options["bias"][0]
        h = h * torch.from_numpy(self.table) * self.power
        return (h * SCALE + TABLE["shift"]).square().mean()


@pytest.fixture
def head() -> Iterator[Head]:
    global SCALE
    torch.manual_seed(0)
    scale, shift, power = SCALE, TABLE["shift"], Head.power
    yield Head()
    SCALE, TABLE["shift"], Head.power = scale, shift, power


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def agrees(plain: nn.Module, compiled: Any, *args: Any) -> None:
    """Loss and gradients of a call, in training, are eager's."""
    steps: list[tuple[Tensor, list[Tensor | None]]] = []
    for call in (lambda: nn.Module.__call__(plain, *args), lambda: compiled(*args)):
        plain.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = call()
        loss.backward()
        steps.append((loss.detach(), [p.grad for p in plain.parameters()]))
    torch.testing.assert_close(steps[1][0], steps[0][0])
    for ours, eager in zip(steps[1][1], steps[0][1], strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(ours, eager)


def scale(_: Head) -> None:
    global SCALE
    SCALE = 3.0


def swap(model: Head) -> None:
    model.linear = nn.Linear(4, 4, bias=False)


def forward(model: Head) -> None:
    def other(x: Tensor, act: Any = None) -> Tensor:
        return model.linear(x).square().sum()

    model.forward = other  # pyright: ignore[reportAttributeAccessIssue]


CHANGES: dict[str, Callable[[Head], object]] = {
    "an attribute": lambda m: setattr(m, "tau", 5.0),
    "its type": lambda m: setattr(m, "tau", True),
    "of dropout": lambda m: setattr(m.drop, "p", 0.0),
    "the mode": lambda m: m.eval(),
    "the mode of a part": lambda m: m.drop.eval(),
    "a weight frozen": lambda m: m.linear.weight.requires_grad_(False),
    "a hook": lambda m: m.linear.register_forward_hook(lambda _m, _a, out: out * 2),
    "a hook before": lambda m: m.linear.register_forward_pre_hook(lambda _m, a: (a[0] * 2,)),
    "a list in a dict": lambda m: m.options["bias"].__setitem__(0, 7.0),
    "the dict": lambda m: setattr(m, "options", {"bias": [3.0]}),
    "an array": lambda m: m.table.fill(4.0),
    "an attribute of the class": lambda m: setattr(Head, "power", 3.0),
    "one that hides it": lambda m: setattr(m, "power", 3.0),
    "a global": scale,
    "what a global holds": lambda m: TABLE.update(shift=9.0),
    "a module": swap,
    "the forward": forward,
    "a parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
}
VALUES: dict[str, Callable[[Head], object]] = {
    "a tensor filled": lambda m: m.mask.fill_(3.0),
    "a tensor replaced": lambda m: setattr(m, "mask", torch.full((4,), 2.0)),
    "an equal dict": lambda m: setattr(m, "options", {"bias": [0.25]}),
    "the same value": lambda m: setattr(m, "tau", float("1.0")),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_the_trace_read_makes_a_new_program(head: Head, change: str) -> None:
    model = autopar.compile(head)
    agrees(head, model, X)
    CHANGES[change](head)
    for _ in range(2):
        agrees(head, model, X)
    assert len(model.plans) == (1 if change == "a parameter" else 2)


@pytest.mark.parametrize("change", VALUES)
def test_values_of_tensors_and_equal_objects_do_not(head: Head, change: str) -> None:
    model = autopar.compile(head)
    agrees(head, model, X)
    VALUES[change](head)
    agrees(head, model, X)
    assert len(model.plans) == 1


def test_what_was_before_finds_its_program_again(head: Head) -> None:
    model = autopar.compile(head)
    for _ in range(2):
        hook = head.linear.register_forward_hook(lambda _m, _a, out: out * 2)
        agrees(head, model, X)
        hook.remove()
        for head.tau in (1.0, 2.0):
            for mode in (True, False):
                head.train(mode)
                agrees(head, model, X)
        head.train()
    assert len(model.plans) == 6  # each hook is another function


def test_factories_follow_the_default_dtype() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() + torch.full((), 1 / 3)

    plain = Makes()
    model = autopar.compile(plain)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            agrees(plain, model, X)
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(model.plans) == 2


def test_a_parameter_thawed_is_trained(head: Head) -> None:
    head.linear.bias.requires_grad_(False)
    model = autopar.compile(head)
    agrees(head, model, X)
    assert head.linear.bias.grad is None
    head.linear.bias.requires_grad_(True)
    agrees(head, model, X)
    assert head.linear.bias.grad is not None


def test_frozen_and_thawed_in_turn(head: Head) -> None:
    model = autopar.compile(head)
    for trained in (True, False, True, False):
        head.linear.weight.requires_grad_(trained)
        agrees(head, model, X)
        with torch.no_grad():
            model(X)
    assert len(model.plans) == 2


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, how: Any) -> Tensor:
        h = self.linear(x)
        if isinstance(how, Kind):
            h = h * how.value
        elif isinstance(how, complex):
            h = h * how.imag
        elif isinstance(how, np.ndarray):
            h = h * float(how[0])
        elif isinstance(how, Options | SimpleNamespace):
            h = h * how.factor
        else:
            h = how(h)
        return h.square().sum()


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


PAIRS: dict[str, tuple[Any, Any]] = {
    "functions": (torch.relu, torch.tanh),
    "closures": (times(2.0), times(3.0)),
    "enums": (Kind.PLUS, Kind.MINUS),
    "complex": (1 + 2j, 1 + 3j),
    "arrays": (np.array([2.0]), np.array([3.0])),
    "objects": (Options(2.0), Options(3.0)),
    "namespaces": (SimpleNamespace(factor=2.0), SimpleNamespace(factor=3.0)),
    "modules": (nn.Tanh(), nn.Sigmoid()),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_arguments_are_known_by_what_they_are(pair: str) -> None:
    plain = Takes()
    model = autopar.compile(plain)
    first, second = PAIRS[pair]
    for value in (first, second, first, second):
        agrees(plain, model, X, value)
    assert len(model.plans) == 2


def test_equal_arguments_share_a_program_and_a_changed_one_does_not() -> None:
    plain = Takes()
    model = autopar.compile(plain)
    options = Options(2.0)
    for value in (options, Options(2.0), times(2.0), times(2.0)):
        agrees(plain, model, X, value)
    assert len(model.plans) == 2
    options.factor = 3.0
    agrees(plain, model, X, options)
    assert len(model.plans) == 3


def test_what_cannot_be_watched_is_named() -> None:
    model = autopar.compile(Takes())
    with pytest.raises(GuardError, match=r"argument 1 \(a list_iterator\).*changes as it is used"):
        model(X, iter([1]))
    with pytest.raises(GuardError, match=r"argument 1 \(a SimpleNamespace\) holds a tensor"):
        model(X, SimpleNamespace(factor=torch.ones(4)))

    class Draws(Takes):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() * float(self.rng.random())

    with pytest.raises(GuardError, match=r"rng of the model is a Generator"):
        autopar.compile(Draws())(X)


class Acts(nn.Module):
    """Does one thing in Python each time it is called."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__()
        self.linear, self.n, self.seen = nn.Linear(4, 4), 0, list[Any]()
        self.register_buffer("mean", torch.zeros(4))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.linear(x).sum() + self.mean.sum()


COUNT = {"n": 0}


def count(_: Acts) -> None:
    COUNT["of another name"] = 1


EFFECTS: dict[str, tuple[Callable[[Acts], object], str]] = {
    "a list": (lambda m: m.seen.append(1), "sets seen of the model"),
    "a global": (count, "changes COUNT of"),
    "a module": (lambda m: setattr(m, "more", nn.Linear(1, 1)), "replaces more of the model"),
    "random": (lambda m: random.random(), "draws from Python's random"),
    "numpy": (lambda m: np.random.rand(), "draws from numpy's random"),  # noqa: NPY002
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_what_forward_does_in_python_is_named(effect: str) -> None:
    act, told = EFFECTS[effect]
    model = Acts(act)
    before = {**vars(model)}, list(model.seen), dict(COUNT), random.getstate()
    compiled = autopar.compile(model)
    with pytest.warns(SideEffectWarning, match=told):
        compiled(X)
    assert before == ({**vars(model)}, model.seen, COUNT, random.getstate())
    with pytest.raises(TraceError, match=told):
        autopar.compile(Acts(act), search={"strict": True})(X)


def test_a_buffer_that_forward_replaces_is_changed() -> None:
    def replace(model: Acts) -> None:
        model.mean = model.mean * 0.5 + 1.0

    plain, model = Acts(replace), autopar.compile(Acts(replace))
    for _ in range(3):
        plain(X), model(X)
    torch.testing.assert_close(model.mean, plain.mean)
    assert len(model.plans) == 1


class Fading(nn.Module):
    """Buffers that are replaced once gradients need what they were."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.scale + self.shift
        self.scale = self.scale * 0.9
        h = h.tanh() * self.scale
        with torch.no_grad():
            self.scale = self.scale + h.mean(0)
            self.shift = self.shift + 1
        self.shift.mul_(0.5)
        return (h * self.scale + self.shift).square().sum()


def test_a_buffer_is_replaced_once_gradients_need_what_it_was() -> None:
    plain, model = Fading(), autopar.compile(Fading())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.prepare(X)
    for _ in range(3):
        losses = [each(X) for each in (plain, model)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for name, tensor in plain.state_dict(keep_vars=True).items():
            torch.testing.assert_close(model.state_dict()[name], tensor.detach())
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
    assert len(model.plans) == 1


def test_a_tensor_that_is_a_plain_attribute_is_changed_as_eager_changes_it() -> None:
    class Counts(Takes):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x).sum() * self.count

    torch.manual_seed(0)
    plain = Counts()
    torch.manual_seed(0)
    model = autopar.compile(Counts())
    for _ in range(3):
        torch.testing.assert_close(model(X), plain(X))
    assert model.count == plain.count == 3
    assert "count" not in dict(model.named_buffers())


def test_a_value_that_changes_with_every_call_is_told(head: Head) -> None:
    model = autopar.compile(head)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(9):
            head.tau = float(step)
            model(X)
    assert [w.category for w in told] == [ManyProgramsWarning]
    assert "8 programs" in str(told[0].message) and "tau of the model" in str(told[0].message)
