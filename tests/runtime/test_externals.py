"""Tensors that require a gradient, and are no parameters of the model that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import autopar
from autopar.errors import AutoparError, TraceError
from autopar.ir.graph import Role
from autopar.tracer import only_losses, trace
from autopar.tracer.find import find_runs
from autopar.tracer.watch import Watch
from tests.runtime.external_workers import (
    SCRIPTS,
    WIDTH,
    Scaled,
    Script,
    Stack,
    attribute,
    batches_of_gradients,
    far,
)
from tests.runtime.spawn import spawn


def _none_far(ranks: list[object]) -> None:
    for rank in ranks:
        assert isinstance(rank, dict) and rank
        assert {name: far for name, far in rank.items() if not far < 1e-5} == {}


@pytest.mark.parametrize("make", SCRIPTS)
def test_they_are_trained_as_in_eager(make: Callable[[], Script]) -> None:
    assert far(make) < 1e-5


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_they_are_trained_on_several_ranks(size: int) -> None:
    _none_far(spawn("tests.runtime.external_workers.scripts", size))


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_they_are_trained_under_all_options(size: int) -> None:
    _none_far(spawn("tests.runtime.external_workers.options", size))


@pytest.mark.processes
def test_their_gradient_is_of_the_mean_of_ranks_with_rows_of_their_own() -> None:
    _none_far(spawn("tests.runtime.external_workers.of_own_rows", 2))


@pytest.mark.processes
def test_what_ranks_have_apart_is_told() -> None:
    for told in spawn("tests.runtime.external_workers.apart", 2):
        assert isinstance(told, list)
        assert all("kept, which forward reads" in each for each in told), told


@pytest.mark.processes
def test_leaves_are_those_of_rank_0() -> None:
    first, second = spawn("tests.runtime.external_workers.leaves_of_rank_0", 2)
    assert first == second


def test_what_is_not_read_is_no_part_of_the_program() -> None:
    model: Any = Scaled(lambda _: torch.ones(WIDTH))
    model.unread = torch.ones(1000).requires_grad_()
    assert "unread" not in [n.target for n in trace(model, (torch.ones(2, WIDTH),)).graph.nodes]


def test_equal_blocks_with_tensors_of_their_own_are_traced_once() -> None:
    model = Stack(8)
    (run,) = find_runs(model, (torch.ones(2, WIDTH),), {}, only_losses, Watch(model))
    assert len(run.kept) < 8
    graph = trace(model, (torch.ones(2, WIDTH),)).graph
    own = [n for n in graph.with_role(Role.PARAM) if n.external]
    assert [n.target for n in own if "blocks" in n.target] == [
        f"blocks.{k}.scale" for k in range(8)
    ]
    assert {n.key for n in own} == {"external:blocks.*.scale", "external:external-0"}
    assert len(graph.with_role(Role.GRAD)) == 3 * 8 + 1


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + 0 * y.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, grads[0].sum().expand(WIDTH)


def test_what_comes_in_unseen_is_told() -> None:
    hidden = torch.ones(WIDTH, requires_grad=True)
    model = Scaled(lambda m: Doubles.apply(m.second.bias, hidden))
    with pytest.raises(TraceError, match=r"shape \(6,\), .* in a way that autopar cannot follow"):
        autopar.compile(model)(torch.ones(2, WIDTH))


class Replaces(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.kept = self.kept * 0.9
        return loss


def test_one_that_forward_replaces_is_told() -> None:
    model = Replaces(lambda m: m.kept)
    model.kept = torch.ones(WIDTH, requires_grad=True)
    with pytest.raises(TraceError, match=r"another tensor in the place of kept of the model"):
        autopar.compile(model)(torch.ones(2, WIDTH))


def test_what_needs_no_gradient_any_more_has_another_program() -> None:
    script = attribute()
    model: Any = autopar.compile(script.model)
    x = torch.ones(2, WIDTH)
    model(x).backward()
    held = script.trained[0]
    before = held.grad
    held.requires_grad_(False)
    model(x).backward()
    assert held.grad is before and len(model.plans) == 2
    held.requires_grad_(True)
    model(x).backward()
    assert held.grad is not None and len(model.plans) == 2


def test_verification_leaves_no_gradient_behind() -> None:
    hyper, model = nn.Linear(3, WIDTH), Scaled(lambda m: m.kept)
    model.kept = hyper(torch.ones(3))
    compiled: Any = autopar.compile(model, verify=True)
    loss = compiled(torch.ones(2, WIDTH))
    assert hyper.weight.grad is None and model.kept.grad_fn is not None
    loss.backward()
    assert hyper.weight.grad is not None


def test_verification_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.simulator import spmd

    script, plain = attribute(), spmd.StepResult

    def wrong(outputs: Any, gradients: Any) -> Any:
        return plain(outputs, {n: x * (2 if n == "kept" else 1) for n, x in gradients.items()})

    monkeypatch.setattr(spmd, "StepResult", wrong)
    with pytest.raises(AutoparError, match="kept"):
        autopar.compile(script.model, verify=True)(torch.ones(2, WIDTH))


def _dual(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


TRANSFORMS: dict[str, Callable[[Any, Tensor, dict[str, Tensor]], Any]] = {
    "grad": lambda m, x, w: grad(lambda w: functional_call(m, w, (x,)))(w),
    "vmap of grad": lambda m, x, w: vmap(
        grad(lambda w, x: functional_call(m, w, (x[None],))), in_dims=(None, 0)
    )(w, x),
    "jacrev": lambda m, x, w: jacrev(lambda w: functional_call(m, w, (x,)))(w),
    "jacfwd": lambda m, x, w: jacfwd(m)(x),
    "jvp": lambda m, x, w: jvp(m, (x,), (x,)),
    "vjp": lambda m, x, w: vjp(m, x),
    "vmap": lambda m, x, w: vmap(m)(x),
    "dual numbers": lambda m, x, w: _dual(m, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"
)  # by torch's own forward mode
def test_transforms_of_functions_are_sent_to_the_plain_model(name: str) -> None:
    model: Any = autopar.compile(Scaled(lambda _: torch.ones(WIDTH)))
    x = torch.ones(4, WIDTH)
    model(x)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    with pytest.raises(AutoparError, match=r"torch\.func .* with model\.unsharded\(\) as plain"):
        TRANSFORMS[name](model, x, weights)
    with model.unsharded() as plain:
        TRANSFORMS[name](plain, x, {n: p.detach() for n, p in plain.named_parameters()})


def test_several_gradients_at_once() -> None:
    _none_far([batches_of_gradients()])


@pytest.mark.processes
def test_several_gradients_at_once_on_several_ranks() -> None:
    _none_far(spawn("tests.runtime.external_workers.batches_of_gradients", 2))
