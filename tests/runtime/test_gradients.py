"""Gradients through any output are eager's: planned where they are asked for, and where the first
backward shows that they are wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, ConstraintError
from tests.grouped import grouped


class Net(nn.Module):
    """Dropout, batch norm and a counter; returns a loss, logits, a hidden state and a choice."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.head = nn.Linear(8, 2)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.calls += 1
        h = self.dropout(torch.tanh(self.norm(self.up(x)))) * self.calls.clone()
        logits = self.down(h)
        loss = ((logits - y) ** 2).mean()
        more = (h, [self.head(h)])
        return {"loss": loss, "logits": logits, "more": more, "choice": logits.argmax(-1)}


def points(n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 4, generator=generator)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def net() -> Net:
    return made()


Loss = Callable[[Mapping[str, Any]], Tensor]

LOSSES: dict[str, Loss] = {
    "both": lambda out: out["loss"] + out["logits"].square().mean(),
    "logits alone": lambda out: out["logits"].exp().sum(),
    "hidden": lambda out: out["loss"] * 2 + out["more"][0].sum() * out["logits"].mean(),
    "a head of its own": lambda out: out["more"][1][0].square().sum(),
    "the loss alone": lambda out: out["loss"],
}


def step(model: Any, loss: Loss, *given: Tensor) -> list[Tensor]:
    """Outputs, gradients and buffers of a step, with the random numbers that follow it."""
    model.zero_grad()
    torch.manual_seed(3)
    out = model(*(given or points()))
    loss(out).backward()
    params = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [out["loss"], out["logits"], *params, *model.buffers(), torch.rand(2)]


@pytest.mark.breadth(6)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("asked", [(), "logits", ["logits", "more.*"], "*"])
def test_gradients_through_any_output_are_those_of_eager(name: str, asked: str | list[str]) -> None:
    net = made()
    model = autopar.compile(copy.deepcopy(net), outputs={"differentiable": asked})
    for _ in range(2):
        torch.testing.assert_close(step(model, LOSSES[name]), step(net, LOSSES[name]))
    assert len(model.plans) == 1


def test_outputs_have_the_gradients_of_eager(net: Net) -> None:
    ours, theirs = autopar.compile(copy.deepcopy(net))(*points()), net(*points())
    for name in ("loss", "logits", "choice"):
        assert ours[name].requires_grad == theirs[name].requires_grad
    with torch.no_grad():
        assert not autopar.compile(net)(*points())["logits"].requires_grad


def test_what_backward_shows_is_planned_from_then_on(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = autopar.compile(net)
    step(model, LOSSES["both"])
    plan = model.plans[0]
    assert list(plan.structure.only.outputs) == ["detached:2", "detached:3", "detached:4"]
    monkeypatch.setattr("autopar.driver.training.session.answer", None)
    step(model, LOSSES["both"])
    assert model.plans == (plan,)
    monkeypatch.undo()
    step(model, LOSSES["both"], *points(6))
    assert list(model.plans[1].structure.only.outputs) == ["detached:2", "detached:3", "detached:4"]


def test_calls_that_wait_for_their_backward_are_all_done_again(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net))
    for each in (model, net):
        torch.manual_seed(1)
        outs = [each(*points()), each(*points()), each(*points())]
        (outs[0]["loss"] + outs[1]["logits"].sum()).backward(retain_graph=True)
        outs[0]["logits"].square().sum().backward()
        (outs[1]["loss"] * 3 + outs[2]["logits"].sum()).backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(list(model.buffers()), list(net.buffers()))
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        outs[2]["logits"].sum().backward()


def test_autocast_is_that_of_the_call(net: Net) -> None:
    net = Net(0.0)
    model = autopar.compile(copy.deepcopy(net))
    for each in (model, net):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = each(*points())
        LOSSES["both"](out).backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=2**-4, atol=2**-6)


@torch.no_grad()
def scaled(param: Tensor) -> None:
    param.mul_(2)


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a parameter": (
        lambda model, x: scaled(model.head.weight),
        "parameter head.weight was changed",
    ),
    "an input": (lambda model, x: x.zero_(), r"input 0 was changed in place since"),
    "the mode": (lambda model, x: model.eval(), r"the model was changed since, as by train\(\)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_where_the_forward_cannot_be_done_again_the_output_and_the_option_are_named(
    net: Net, name: str
) -> None:
    change, words = CHANGES[name]
    model = autopar.compile(net)
    x, y = points()
    out = model(x, y)
    change(model, x)
    with pytest.raises(AutoparError, match=words) as caught:
        out["logits"].sum().backward()
    assert "goes through output logits" in str(caught.value)
    assert "outputs={\"differentiable\": ['logits']}" in str(caught.value)


def test_the_option_is_one_of_plan_and_its_plans_are_applied(net: Net) -> None:
    x, y = points()
    inputs = {"x": x, "y": y}
    found = autopar.plan(net, inputs, cluster="2xcpu", outputs={"differentiable": "more.1.0"})
    assert list(found.structure.only.outputs) == ["detached:1", "detached:2", "detached:4"]
    autopar.verify(found, net, inputs)
    alone = autopar.plan(net, inputs, cluster="cpu", outputs={"differentiable": "more.1.0"})
    model = autopar.compile(net, plan=alone)
    model(x=x, y=y)["more"][1][0].sum().backward()
    assert model.plans == (alone,) and net.head.weight.grad is not None


@pytest.mark.parametrize("where", ["plan", "compile"])
def test_an_output_that_there_is_not(net: Net, where: str) -> None:
    words = "outputs.differentiable: Net has no output logit; close to it are logits"
    with pytest.raises(ConstraintError, match=words):
        if where == "plan":
            autopar.plan(net, points(), cluster="cpu", outputs={"differentiable": "logit"})
        else:
            autopar.compile(net, outputs={"differentiable": "logit"})(*points())


class TwoLosses(nn.Module):
    """Two losses, each of a head of its own behind a layer that both have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.left(h).square().mean(), self.right(h).square().mean()


@pytest.mark.parametrize("how", [{}, {"microbatches": 2}])
def test_what_no_loss_leads_to_has_no_gradient(how: dict[str, Any]) -> None:
    """So that an optimizer leaves it alone, whose moments and decay would move it."""
    plain, x = TwoLosses(), torch.randn(8, 4)
    ours = autopar.compile(copy.deepcopy(plain), cluster="cpu", **grouped(**how))
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (plain, ours)]
    for losses in ((0, 1), (0,), (1,), (0,)):
        for each in (plain, ours):
            found = each(x)
            sum(found[k] for k in losses).backward()
        for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (losses, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q, p)


class Remembering(nn.Module):
    """Uses copies of a buffer and of a frozen weight, and then changes both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))
        self.factor = nn.Parameter(torch.rand(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x)) * self.scale.clone() * self.factor.clone()
        with torch.no_grad():
            self.scale.mul_(0.9)
            self.factor.mul_(1.1)
        return h.square().mean()


@pytest.mark.parametrize("how", [{}, {"microbatches": 2}])
def test_a_copy_of_what_a_model_changes_is_of_the_values_before(how: dict[str, Any]) -> None:
    plain = Remembering()
    ours = autopar.compile(copy.deepcopy(plain), cluster="cpu", **grouped(**how))
    for _ in range(3):
        x = torch.randn(8, 8)
        for each in (plain, ours):
            each(x).backward()
    for (name, a), b in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, msg=name)
    torch.testing.assert_close(ours.layer.weight.grad, plain.layer.weight.grad)
