"""The compiled module on one device: what it shares with the model, and when it makes a program."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import (
    AutoparError,
    ClusterError,
    InfeasibleError,
    PlanError,
    PlanMismatchError,
    TraceError,
)


class Net(nn.Module):
    """tanh(x up) down, with a name, a buffer and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.name = "net"

    def forward(self, x: Tensor, *, y: Tensor | None = None, scale: float = 1.0) -> Any:
        self.calls += 1
        h = self.down(torch.tanh(self.up(x))) * scale
        return h if y is None else {"loss": ((h - y) ** 2).mean(), "h": h, "scale": scale}

    def hello(self) -> str:
        return f"hello from {self.name}"


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def points(n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 4, generator=generator)


def test_a_step_is_that_of_the_model(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net))
    x, y = points()
    ours, theirs = model(x, y=y), net(x, y=y)
    ours["loss"].backward()
    theirs["loss"].backward()
    assert list(ours) == ["loss", "h", "scale"] and ours["scale"] == 1.0
    torch.testing.assert_close(ours["loss"], theirs["loss"])
    torch.testing.assert_close(ours["h"], theirs["h"])
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert model.calls == net.calls == 1


def test_an_output_that_is_no_loss_takes_any_gradient(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net))
    x, _ = points()
    (model(x) ** 3).sum().backward()
    (net(x) ** 3).sum().backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_it_is_the_model_to_its_user(net: Net, tmp_path: Path) -> None:
    names = [name for name, _ in net.named_parameters()]
    params = list(net.parameters())
    model = autopar.compile(net)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert list(model.state_dict()) == list(net.state_dict())
    assert model.hello() == "hello from net" and model.up is net.up
    model.name = "other"
    assert net.name == "other" and model.hello() == "hello from other"
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        _ = model.absent
    model.eval()
    assert not net.training and not net.up.training
    assert model.train() is model and net.up.training
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert "made from Net" in repr(model)


def test_moves_and_casts_are_refused_but_for_those_that_change_nothing(net: Net) -> None:
    model = autopar.compile(net)
    assert model.to("cpu") is model and model.float() is model
    with pytest.raises(AutoparError, match=r"up\.weight cannot go from torch\.float32 on cpu to "):
        model.double()


def test_programs_are_kept_by_signature(net: Net) -> None:
    model = autopar.compile(net)
    x, y = points()
    model(x, y=y, scale=2.0)
    model(scale=2.0, y=y, x=x)
    assert len(model.plans) == 2  # x by position and by keyword
    model(y=y, scale=2.0, x=x)
    with torch.no_grad():
        model(x, y=y, scale=2.0)
    assert len(model.plans) == 2
    model(*points(6)[:1])
    assert model(x, y=y, scale=3.0)["scale"] == 3.0
    model.eval()  # of which nothing in the model asks
    model(x, y=y, scale=3.0)
    net.up.weight.requires_grad_(False)
    model(x, y=y, scale=3.0)
    assert len(model.plans) == 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_no_gradients(net: Net, mode: Callable[[], Any]) -> None:
    model = autopar.compile(copy.deepcopy(net)).eval()
    x, y = points()
    with mode():
        results = model(x, y=y)
        expected = net(x, y=y)
    assert results["loss"].grad_fn is None
    torch.testing.assert_close(results["loss"], expected["loss"])
    torch.testing.assert_close(results["h"], expected["h"])
    assert model.calls == 1


def test_a_model_without_trained_parameters_has_a_forward_only(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net).requires_grad_(False))
    x, y = points()
    loss = model(x, y=y)["loss"]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, net(x, y=y)["loss"].detach())


def test_autocast_is_that_of_the_call(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net))
    x, _ = points()
    assert model(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = model(x), net(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    # Eager adds the bias before it rounds, the graph after.
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9)
    assert len(model.plans) == 2


def test_gradients_accumulate_over_calls(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net))
    for n in (4, 4):
        model(*points(n)[:1]).sum().backward()
        net(*points(n)[:1]).sum().backward()
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_inductor_computes_the_same(net: Net) -> None:
    model = autopar.compile(copy.deepcopy(net), backend="inductor")
    x, y = points()
    loss, expected = model(x, y=y)["loss"], net(x, y=y)["loss"]
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_stored_plan_is_applied_without_solving(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = points()
    path = tmp_path / "plan.json"
    autopar.plan(net, (x,), cluster="cpu").save(path)
    found = autopar.plan(net, {"x": x, "y": y}, cluster="cpu")
    monkeypatch.setattr(
        importlib.import_module("autopar.driver.planning"), "make_graph_request", None
    )
    model = autopar.compile(net, plan=path)
    with caplog.at_level(logging.INFO, "autopar"):
        model(x)
    told = [r.levelname for r in caplog.records if r.name.startswith("autopar")]
    assert told == ["INFO"]
    assert "Net on mesh 1: step" in caplog.text
    assert f"plan {model.plans[0].digest[:12]}" in caplog.text
    assert autopar.compile(net, plan=found)(x=x, y=y)["loss"] > 0


def test_a_plan_for_other_inputs_is_refused(net: Net) -> None:
    stored = autopar.plan(net, points()[0], cluster="cpu")
    model = autopar.compile(net, plan=stored)
    with pytest.raises(PlanMismatchError, match=r"for inputs 0: float32\[4, 6\], the call has"):
        model(points(8)[0])
    model(points()[0])
    assert model(points(8)[0]).shape == (8, 4)  # A later call may differ: it is planned anew.


def test_a_plan_for_another_model_is_refused(net: Net) -> None:
    other = nn.Sequential(nn.Linear(6, 4))
    stored = autopar.plan(other, points()[0], cluster="cpu")
    with pytest.raises(PlanMismatchError, match=r"only the plan has the parameters 0\.bias, 0\.we"):
        autopar.compile(net, plan=stored)
    wider = Net()
    wider.up = nn.Linear(6, 16)
    wider.down = nn.Linear(16, 4)
    stored = autopar.plan(wider, points()[0], cluster="cpu")
    with pytest.raises(PlanMismatchError, match=r"up\.bias \(float32\[16\] in the plan, float"):
        autopar.compile(net, plan=stored)


def test_a_plan_for_other_ops_is_refused(net: Net) -> None:
    stored = autopar.plan(net, points()[0], cluster="cpu")
    changed = Net()
    changed.forward = lambda x: changed.down(torch.relu(changed.up(x)))
    with pytest.raises(PlanMismatchError, match=r"only the model has the ops .*relu"):
        autopar.compile(changed, plan=stored)(points()[0])


def test_a_plan_for_other_devices_is_refused(net: Net) -> None:
    stored = autopar.plan(net, points()[0], cluster="2xcpu")
    with pytest.raises(PlanMismatchError, match=r"for 2 devices \(mesh dp=2\), but 1 process run"):
        autopar.compile(net, plan=stored)
    with pytest.raises(PlanMismatchError, match="cluster 8xcpu has 8 devices, but 1 process run"):
        autopar.compile(net, cluster="8xcpu")


def test_limits_that_cannot_be_met(net: Net) -> None:
    with pytest.raises(InfeasibleError, match=r"is missing\. It holds parameters") as caught:
        autopar.plan(net, points(4)[0], cluster="2xcpu", memory={"limit": "256B"})
    assert "batch cannot" not in str(caught.value)
    with pytest.raises(InfeasibleError, match=r"dim 0 of input 0 is 3, which 2 does not divide"):
        autopar.plan(net, points(3)[0], cluster="2xcpu", memory={"limit": "256B"})


def test_mistakes_are_told_before_work(net: Net, tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="no backend 'jit'"):
        autopar.compile(net, backend="jit")
    with pytest.raises(PlanError, match="cannot read plan"):
        autopar.compile(net, plan=tmp_path / "absent.json")
    with pytest.raises(ClusterError, match="nothing"):
        autopar.compile(net, cluster="8xnothing")
    with pytest.raises(
        AutoparError, match=r"parameters without values, on the meta device: 0\.weight"
    ):
        autopar.compile(nn.Sequential(nn.Linear(2, 2, device="meta")))
    with pytest.raises(AutoparError, match=r"memory\.limit: '72' has no unit"):
        autopar.compile(net, memory={"limit": "72"})
    model = autopar.compile(net)
    with pytest.raises(AutoparError, match="compiled already"):
        autopar.compile(model)
    with pytest.raises(TraceError, match="requires grad"):
        model(points()[0].requires_grad_())


def test_a_module_put_in_another_ones_place_is_used(net: Net) -> None:
    model = autopar.compile(net)
    x, _ = points()
    model(x)
    net.up = nn.Linear(6, 8)
    torch.testing.assert_close(model(x), net(x))


def test_a_model_may_have_a_forward_of_its_own(net: Net) -> None:
    before = net.forward
    net.forward = lambda x: before(x) + 1
    model = autopar.compile(net)
    x, _ = points()
    torch.testing.assert_close(model(x), before(x) + 1)
    assert len(model.plans) == 1


def test_inputs_of_plan_in_every_form(net: Net) -> None:
    x, _ = points()
    forms: tuple[Any, ...] = (x, (x,), [x])
    digests = {autopar.plan(net, form, cluster="cpu").digest for form in forms}
    assert len(digests) == 1
    said: list[str] = []
    autopar.plan(net, {"x": x}, progress=said.append)
    assert said[0] == "tracing the model" and len(said) > 1
