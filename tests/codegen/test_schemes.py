"""The tensor-parallel schemes of the literature as points of the space: each, pinned, sends exactly
the bytes of its formula and keeps nothing larger than its memory claim for backward.

A product Y = XW, X [B, S], W [S, R], between two pointwise ops. Formulas are those of the design,
bytes received per rank over rings, #T the bytes of the whole tensor T.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.simulator import spmd
from autopar.tracer import Traced, trace
from tests.layouts import program_of
from tests.planned import on_h100, plan_for
from tests.sent import observed, received

B, S, R = 16, 32, 64
X, W, Y = (8 * size for size in (B * S, S * R, B * R))
SCALE = 8
"""Bytes of the gradient of the scale, which shares a message with that of W where both are
all-reduced; alone it is not counted."""


class Product(nn.Module):
    """X is scaled by a parameter, so that it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(torch.randn(S, R))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x * self.scale) @ self.weight).sum()


@dataclass(frozen=True)
class Scheme:
    """`mm`: what each axis cuts of the product ("m", "k", "n" or "-"); `x`, `w`, `y`: how X, W and
    Y lie between ops; `kept`: W in backward; `x_saved`: X in backward; bytes sent, and those saved
    from forward to backward on each rank."""

    mesh: str
    mm: str
    x: str
    w: str
    y: str
    kept: str
    x_saved: str
    forward: Fraction
    backward: Fraction
    saved: Fraction


def ring(n: int, *terms: tuple[int, float]) -> Fraction:
    """(n - 1)/n of the sum of `terms`, each (bytes, divided by)."""
    return Fraction(n - 1, n) * sum((Fraction(b) / Fraction(d) for b, d in terms), Fraction(0))


SCHEMES = {
    "data parallel": Scheme(
        "4", "m", "[S(0)]", "[R]", "[S(0)]", "[R]", "[S(0)]",
        Fraction(0), 2 * ring(4, (W + SCALE, 1)), Fraction(X + Y, 4) + W,
    ),
    "ZeRO-3": Scheme(
        "4", "m", "[S(0)]", "[S(0)]", "[S(0)]", "[S(0)]", "[S(0)]",
        ring(4, (W, 1)), 2 * ring(4, (W, 1)), Fraction(X + Y + W, 4),
    ),
    "1D column": Scheme(
        "4", "n", "[R]", "[S(1)]", "[S(1)]", "[S(1)]", "[R]",
        Fraction(0), 2 * ring(4, (X, 1)), X + Fraction(Y + W, 4),
    ),
    "1D row": Scheme(
        "4", "k", "[S(1)]", "[S(0)]", "[R]", "[S(0)]", "[S(1)]",
        2 * ring(4, (Y, 1)), Fraction(0), Fraction(X + W, 4) + Y,
    ),
    "2D": Scheme(
        "2x2", "m,n", "[S(0), S(1)]", "[S(0), S(1)]", "[S(0), S(1)]", "[S(0), S(1)]",
        "[S(0), S(1)]", ring(2, (X + W, 2)), 2 * ring(2, (X + W, 2)), Fraction(X + W + Y, 4),
    ),
    "2.5D": Scheme(
        "2x2x2", "m,m,n", "[S(0), S(0), S(1)]", "[R, S(0), S(1)]", "[S(0), S(0), S(1)]",
        "[R, S(0), S(1)]", "[S(0), S(0), S(1)]",
        ring(2, (X, 4), (W, 2)), 2 * ring(2, (X, 4), (W, 2)) + 2 * ring(2, (W, 4)),
        Fraction(X + Y, 8) + Fraction(W, 4),
    ),
    "3D": Scheme(
        "2x2x2", "m,n,k", "[S(0), S(0), S(1)]", "[S(0), S(1), S(0)]", "[S(0), S(1), S(0)]",
        "[R, S(1), S(0)]", "[S(0), R, S(1)]",
        ring(2, (X + W + Y, 4)), ring(2, (X + W + Y, 4)), Fraction(X + W, 4) + Fraction(Y, 8),
    ),
    "data x tensor": Scheme(
        "2x4", "m,n", "[S(0), R]", "[R, S(1)]", "[S(0), S(1)]", "[R, S(1)]", "[S(0), R]",
        Fraction(0), 2 * ring(4, (X, 2)) + 2 * ring(2, (W, 4), (SCALE, 1)),
        Fraction(X, 2) + Fraction(Y, 8) + Fraction(W, 4),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def traced() -> Traced:
    torch.manual_seed(0)
    return trace(Product().double(), (torch.randn(B, S, dtype=torch.float64),), {})


def swapped(choice: str, names: dict[str, str]) -> str:
    return ",".join(names[c] for c in choice.split(","))


def cut(state: str, *names: str) -> str:
    """The choice of a pointwise op that works on `state`."""
    table = {"R": "-"} | {f"S({d})": name for d, name in enumerate(names)}
    return ",".join(table[p] for p in state[1:-1].split(", "))


def pins(scheme: Scheme) -> dict[str, str]:
    """Backward, dW = X^T dY and dX = dY W^T cut what the forward product cuts."""
    return {
        r"param:weight": f"{scheme.w}|{scheme.kept}",
        r":forward:mul.*": cut(scheme.x, "d0", "d1"),
        r":forward:mm.*": scheme.mm,
        r":forward:tanh.*": cut(scheme.y, "d0", "d1"),
        r":forward:sum.*": cut(scheme.y, "d0", "d1"),
        r":backward:sum.*": cut(scheme.x, "d0", "d1"),
        r":backward:tanh_backward.*": cut(scheme.y, "d0", "d1"),
        r":backward:mm.0": swapped(scheme.mm, {"m": "k", "k": "m", "n": "n", "-": "-"}),
        r":backward:mm.1": swapped(scheme.mm, {"m": "m", "k": "n", "n": "k", "-": "-"}),
        r":backward:mul.*": cut(scheme.x, "d0", "d1"),
        r"saved::forward:mul.0": scheme.x_saved,
        r"saved::forward:tanh.0": scheme.y,
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_sends_and_keeps_what_its_formulas_say(traced: Traced, name: str) -> None:
    scheme, mesh = SCHEMES[name], on_h100(SCHEMES[name].mesh)[1]
    plan = plan_for(traced.graph, scheme.mesh, pins(scheme))
    program = program_of(traced, plan.structure.only)
    model = Product().double()
    x = torch.randn(B, S, dtype=torch.float64)
    tensors = {f"param:{n}": p.detach() for n, p in model.named_parameters()} | {"input:0": x}
    step = observed(program, mesh, traced.graph, plan.structure, tensors)
    assert received(step.forward, mesh) == scheme.forward
    assert sum(v.nbytes for v in step.saved if v.numel() > 1 and v is not x) == scheme.saved
    assert received(step.backward, mesh) == scheme.backward
    found = spmd.train_step(program, mesh, traced.graph, plan.structure.only, tensors)
    model(x).backward()
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(found.gradients[parameter], value.grad, rtol=1e-9, atol=1e-9)
