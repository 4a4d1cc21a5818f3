"""`autopar::experts`: equal to a loop over tokens, for every gate and layout of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.ops.experts import experts_backward, experts_op
from autopar.runtime.ops.gates import ACTIVATIONS, Gate

TOKENS, CHOICES, EXPERTS, INNER, WIDTH = 10, 2, 4, 6, 8
GATES = [*ACTIVATIONS, "swish:1.702 limit=0.7 plus=1.0", "silu limit=0.5"]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def layer(gates: int, *, bias: bool) -> list[Tensor]:
    """x, weights, up, down and, if asked for, up_bias."""
    torch.manual_seed(0)
    found = [
        random(TOKENS, WIDTH),
        torch.rand(TOKENS, CHOICES, dtype=torch.float64),
        random(EXPERTS, gates, INNER, WIDTH),
        random(EXPERTS, WIDTH, INNER),
    ]
    found += [random(EXPERTS, gates, INNER)] if bias else []
    return [x.requires_grad_() for x in found]


def choose() -> Tensor:
    """No token chooses expert 2."""
    return torch.tensor([0, 1, 3])[torch.rand(TOKENS, 3).argsort()][:, :CHOICES]


def by_loop(
    chosen: Tensor, gate: str, x: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows: list[Tensor] = []
    for n in range(TOKENS):
        parts: list[Tensor] = []
        for k in range(CHOICES):
            e = int(chosen[n, k])
            hidden = up[e] @ x[n] + (0 if bias is None else bias[e])
            parts.append(weights[n, k] * (down[e] @ Gate.parse(gate)(hidden[None])[0]))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.parametrize("gate", GATES)
def test_gates_have_the_derivative_they_say(gate: str, gates: int) -> None:
    torch.manual_seed(0)
    hidden, found = random(50, gates, 3).requires_grad_(), Gate.parse(gate)
    out, grad = found(hidden), random(50, 3)
    assert str(found) == gate
    close(found.backward(grad, hidden.detach()), torch.autograd.grad(out, hidden, grad)[0])


@pytest.mark.parametrize("text", ["no", "silu top=1", "swish:", "silu limit"])
def test_a_gate_that_is_not_known_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="no gate"):
        Gate.parse(text)


@pytest.mark.parametrize(("gates", "gate", "bias"), [(2, "silu", False), (1, "relu2", True),
                                                     (2, GATES[-2], True)])  # fmt: skip
def test_like_a_loop_over_tokens(gates: int, gate: str, bias: bool) -> None:
    given = layer(gates, bias=bias)
    chosen, up_bias = choose(), given[4] if bias else None
    expected, grad = by_loop(chosen, gate, *given), random(TOKENS, WIDTH)
    wanted = torch.autograd.grad(expected, given, grad)
    x, weights, up, down = given[:4]
    # Columns of gate and rest next to one another in memory, as some models store them.
    interleaved = up.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    for first, may_skip in ((up, False), (up, True), (interleaved, False)):
        out = experts_op(x, chosen, weights, first, down, up_bias, gate, may_skip)
        close(out, expected)
        leaves = [x, weights, first, *given[3:]]
        for actual, of_loop in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
            close(actual, of_loop)


def test_what_lies_outside_adds_nothing() -> None:
    x, weights, up, down = layer(2, bias=False)
    chosen = choose()
    out = experts_op(x, chosen - 1, weights, up[1:], down[1:], None, "silu", True)
    rest = experts_op(x, chosen, weights * (chosen == 0), up, down, None, "silu", False)
    close(out + rest, experts_op(x, chosen, weights, up, down, None, "silu", False))


@pytest.mark.parametrize("bias", [False, True])
def test_fake_tensors_are_like_real_ones(bias: bool) -> None:
    x, weights, up, down, *rest = (t.detach() for t in layer(2, bias=bias))
    given = (x, choose(), weights, up, down, *(rest or [None]), "silu", False)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(experts_op.op, given, test_utils=checks)
    torch.library.opcheck(experts_backward.op, (x, *given), test_utils=checks[:2])


def test_the_function_for_models_of_ones_own() -> None:
    x, weights, up, down, bias = layer(2, bias=True)
    chosen, last = choose(), random(EXPERTS, WIDTH)
    found = autopar.experts(
        x, chosen, weights, up.flatten(1, 2), down, up_bias=bias.flatten(1), down_bias=last
    )
    expected = by_loop(chosen, "silu", x, weights, up, down, bias)
    close(found, expected + (weights.unsqueeze(-1) * last[chosen]).sum(1))
    plain = autopar.experts(x, chosen, weights, up[:, 0], down, "gelu", gated=False)
    close(plain, by_loop(chosen, "gelu", x, weights, up[:, :1], down))
    with pytest.raises(ValueError, match="no gate 'mish'"):
        autopar.experts(x, chosen, weights, up[:, 0], down, "mish", gated=False)
