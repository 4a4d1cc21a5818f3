"""The autograd function around a program, with graphs written by hand for one rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.program.function import Step


def boxed_forward(boxed: list[Any]) -> Sequence[Any]:
    """loss = sum(tanh(x w)); value = x w; detached = x + 1; a buffer counts."""
    w, count, x = boxed
    boxed.clear()
    h = x @ w
    t = torch.tanh(h)
    return t.sum(), h, x + 1, count + 1, x, t


def boxed_backward(boxed: list[Any]) -> Sequence[Any]:
    x, t, loss_grad, h_grad = boxed
    boxed.clear()
    return (x.T @ ((1 - t * t) * loss_grad + h_grad),)


def make_step(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "forward": boxed_forward,
        "backward": boxed_backward,
        "forward_inputs": ("param:w", "buffer:count", "input:0"),
        "forward_outputs": (
            "loss:0", "value:1", "detached:2", "mutation:count", "saved:0", "saved:1",
        ),
        "backward_inputs": ("saved:0", "saved:1", "tangent:0", "tangent:1"),
        "backward_outputs": ("grad:w",),
    }  # fmt: skip
    return Step(**{**fields, **changes})


@pytest.fixture
def w() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


def others(x: Tensor) -> dict[str, Tensor]:
    return {"buffer:count": torch.tensor(1), "input:0": x}


def test_results_and_gradients(w: Tensor, x: Tensor) -> None:
    results = make_step()({"w": w}, others(x))
    assert list(results) == ["loss:0", "value:1", "detached:2", "mutation:count"]
    assert not results["detached:2"].requires_grad
    assert results["mutation:count"] == 2
    (2 * results["loss:0"] + (results["value:1"] ** 2).sum()).backward()
    reference = w.detach().clone().requires_grad_()
    h = x @ reference
    (2 * torch.tanh(h).sum() + (h**2).sum()).backward()
    torch.testing.assert_close(w.grad, reference.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("used", ["loss:0", "value:1"])
def test_a_result_nobody_used_has_no_gradient(w: Tensor, x: Tensor, used: str) -> None:
    make_step()({"w": w}, others(x))[used].sum().backward()
    reference = w.detach().clone().requires_grad_()
    h = x @ reference
    (torch.tanh(h) if used == "loss:0" else h).sum().backward()
    torch.testing.assert_close(w.grad, reference.grad, rtol=1e-12, atol=0)


def test_no_grad_runs_forward_only(w: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        results = make_step(backward=None)({"w": w}, others(x))
    assert not results["loss:0"].requires_grad
    with torch.no_grad():
        assert make_step()({"w": w}, others(x))["loss:0"].grad_fn is None


def test_backward_twice_is_torchs_error(w: Tensor, x: Tensor) -> None:
    loss = make_step()({"w": w}, others(x))["loss:0"]
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_retain_graph(w: Tensor, x: Tensor) -> None:
    loss = make_step()({"w": w}, others(x))["loss:0"]
    loss.backward(retain_graph=True)
    once = w.grad
    assert once is not None
    w.grad = None
    loss.backward()
    torch.testing.assert_close(w.grad, once, rtol=0, atol=0)


def test_second_derivatives_are_refused(w: Tensor, x: Tensor) -> None:
    loss = make_step()({"w": w}, others(x))["loss:0"]
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, w, create_graph=True)


def test_a_parameter_changed_before_backward_is_an_error(w: Tensor, x: Tensor) -> None:
    def forward(boxed: list[Any]) -> Sequence[Any]:
        w, x = boxed
        return (x @ w).sum(), w.view(3, 4)

    step = make_step(
        forward=forward,
        forward_inputs=("param:w", "input:0"),
        forward_outputs=("loss:0", "saved:0"),
        backward_inputs=("saved:0", "tangent:0"),
    )
    loss = step({"w": w}, others(x))["loss:0"]
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*saved:0"):
        loss.backward()


def test_saved_tensors_are_freed_as_they_are_used(w: Tensor, x: Tensor) -> None:
    alive: list[bool] = []
    watched: list[weakref.ref[Tensor]] = []

    def forward(boxed: list[Any]) -> Sequence[Any]:
        w, _, x = boxed
        first, second = x.clone(), x.clone()
        watched.append(weakref.ref(first))
        return (x @ w).sum(), first, second

    def backward(boxed: list[Any]) -> Sequence[Any]:
        first, second, grad = boxed
        boxed.clear()
        total = first * grad
        del first
        alive.append(watched[0]() is not None)
        return ((total + 0 * second).T @ torch.ones(5, 3, dtype=torch.float64),)

    step = make_step(
        forward=forward,
        backward=backward,
        forward_outputs=("loss:0", "saved:0", "saved:1"),
        backward_inputs=("saved:0", "saved:1", "tangent:0"),
    )
    step({"w": w}, others(x))["loss:0"].backward()
    assert alive == [False]
    torch.testing.assert_close(w.grad, x.T @ torch.ones(5, 3, dtype=torch.float64))


def test_a_saved_result_does_not_keep_itself_alive(w: Tensor, x: Tensor) -> None:
    watched: list[weakref.ref[Tensor]] = []

    def forward(boxed: list[Any]) -> Sequence[Any]:
        w, _, x = boxed
        h = x @ w
        extra = x.clone()
        watched.append(weakref.ref(extra))
        return h.sum(), h, h, extra

    step = make_step(
        forward=forward,
        forward_outputs=("loss:0", "value:1", "saved:0", "saved:1"),
    )
    gc.disable()
    try:
        results = step({"w": w}, others(x))
        assert watched[0]() is not None
        del results
        assert watched[0]() is None
    finally:
        gc.enable()


def test_autocast_around_the_call_does_not_cast_again(w: Tensor, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = make_step()({"w": w.float()}, others(x.float()))
        assert results["value:1"].dtype == torch.float32
