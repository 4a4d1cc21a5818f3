"""What processes do with parameters and pieces of them that have no elements."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar

_inf = float("inf")

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": Tensor.max,
    "min": Tensor.min,
    "amax": Tensor.amax,
    "amin": lambda t: t.amin(0),
    "max along a dim": lambda t: t.max(0).values,
    "argmax": Tensor.argmax,
    "argmin": lambda t: t.argmin(0),
    "median": Tensor.median,
    "norm of order inf": lambda t: t.norm(_inf),
    "norm of order -inf": lambda t: torch.linalg.vector_norm(t, -_inf),
    "norm": Tensor.norm,
    "mean": Tensor.mean,
    "std": Tensor.std,
    "all": lambda t: (t > -9).all(),
    "sum of no dims": lambda t: t.sum(dim=()),
}


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layer(x)
        return made.square().mean(), made


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def uneven() -> dict[str, float]:
    """By how much reductions of a bias of three numbers, of its gradient and of outputs, and what
    they give it as a gradient, are off eager's, on ranks of which some have nothing."""
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    model: Any = autopar.compile(Uneven(), constraints={"strategy": "fsdp"})
    eager = Uneven()
    ours, theirs = model(x), eager(x)
    ours[0].backward()
    theirs[0].backward()
    seen: dict[str, float] = {}
    pairs = {
        "bias": (model.layer.bias, eager.layer.bias),
        "gradient": (model.layer.bias.grad, eager.layer.bias.grad),
        "output": (ours[1].detach(), theirs[1].detach()),
    }
    for what, (one, other) in pairs.items():
        for name, reduce in REDUCTIONS.items():
            got, expected = reduce(one), reduce(other)
            assert got.shape == expected.shape, (what, name)
            off = _whole(got).detach().double() - expected.detach().double()
            seen[f"{name} of {what}"] = float(off.abs().max())
            if what == "bias" and expected.requires_grad:
                grads = (
                    torch.autograd.grad(y.sum(), leaf)[0]
                    for y, leaf in ((got, one), (expected, other))
                )
                left, right = map(_whole, grads)
                seen[f"gradient of {name}"] = float((left - right).abs().max())
    norms = (
        nn.utils.clip_grad_norm_(each.parameters(), 0.1, norm_type=_inf) for each in (model, eager)
    )
    left, right = map(_whole, norms)
    seen["norm for clipping"] = float((left - right).abs())
    seen["clipped"] = float((_whole(model.layer.bias.grad) - eager.layer.bias.grad).abs().max())
    return seen


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda y, e: y.square().mean() + e.sum(),
    "argument": lambda y, e: torch.cat([y.reshape(-1), e.reshape(-1)]).square().mean(),
    "func.grad": lambda y, e: (
        y.square().mean() + (torch.func.grad(lambda z: (z * z).sum())(e) * e).sum()
    ),
}


class Holds(nn.Module):
    """A tensor `e` that is a parameter, frozen or not, or a buffer."""

    def __init__(self, shape: tuple[int, ...], kind: str, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.use = nn.Linear(8, 4, dtype=torch.float64), use
        value = torch.zeros(shape, dtype=torch.float64)
        if kind == "buffer":
            self.register_buffer("e", value)
        else:
            self.e = nn.Parameter(value, requires_grad=kind == "parameter")

    def forward(self, x: Tensor) -> Tensor:
        return USES[self.use](self.layer(x), self.e)


CASES = [
    ((0,), "parameter", "sum"), ((0,), "parameter", "argument"), ((0,), "parameter", "func.grad"),
    ((0, 8), "parameter", "argument"), ((8, 0), "parameter", "func.grad"), ((0,), "frozen", "sum"),
    ((8, 0), "buffer", "argument"), ((3,), "parameter", "sum"),
]  # fmt: skip
"""The last is uneven, and has a gradient that is expanded like those of no elements."""


def without_elements() -> dict[str, float]:
    """By how much a step is off eager's, clipping and state_dict included."""
    return {f"{case}": _trained(*case) for case in CASES}


def _trained(shape: tuple[int, ...], kind: str, use: str) -> float:
    torch.manual_seed(1)
    x = torch.randn(4, 8, dtype=torch.float64)
    off: list[Tensor] = []
    models: list[Any] = [
        autopar.compile(Holds(shape, kind, use), constraints={"strategy": "fsdp"}),
        Holds(shape, kind, use),
    ]
    for _ in range(2):
        losses: list[Tensor] = []
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append(model(x))
            losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            model.zero_grad()
        off.append(losses[0] - losses[1])
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    models[0].load_state_dict(states[0])
    for name, value in states[1].items():
        found = _whole(states[0][name])
        assert found.shape == value.shape, name
        off.append(found - value)
    return max(float(x.detach().abs().max()) for x in off if x.numel())


def odd_batches() -> dict[str, Any]:
    """A first batch that does not divide among ranks under a strategy, and one that does."""
    import warnings

    seen: dict[str, Any] = {}
    for strategy in ("fsdp", "ddp"):
        for rows in (1, 3):
            model: Any = autopar.compile(Uneven(), constraints={"strategy": strategy})
            eager, off = Uneven(), []
            torch.manual_seed(rows)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for size in (rows, 4):
                    x = torch.randn(size, 8, dtype=torch.float64)
                    ours, theirs = model(x)[0], eager(x)[0]
                    ours.backward()
                    theirs.backward()
                    off.append(float((ours - theirs).detach().abs()))
            assert eager.layer.weight.grad is not None
            grad = _whole(model.layer.weight.grad) - eager.layer.weight.grad
            seen[f"{strategy} {rows}"] = {
                "off": max(*off, float(grad.abs().max())),
                "sharded": model.layer.weight.placements[0].is_shard(),
                "told": [str(w.message) for w in caught if "cuts the batch" in str(w.message)],
            }
    return {"rank": int(os.environ["RANK"]), "seen": seen}
