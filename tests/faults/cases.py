"""The few models and plans that `autopar verify` is tried on: each of a kind of plan that a fault
would hide in, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compile import ModelCall, rewritten
from autopar.driver.verify import compare_program
from autopar.plans.plan import Plan
from autopar.runtime.simulator.eager_step import seeded
from autopar.tracer import Traced, trace
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.planned import plan_for

WIDTH, CLASSES = 8, 16
"""Matrices are square where they can be, so that what is turned round keeps its shape."""


class Layers(nn.Module):
    """Two square layers with biases around a pointwise op, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(F.gelu(self.up(x))) + x).square().mean()


class Bare(nn.Module):
    """A product whose sum is saved for backward as it is: nothing is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x)).square().mean()


class Vocabulary(nn.Module):
    """A table that is the head too, under a loss that ignores some targets and weighs classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH, padding_idx=3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("weight", torch.rand(CLASSES))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.layer(self.table(ids))))
        return F.cross_entropy(scores, targets, self.weight, ignore_index=5)


class Attention(nn.Module):
    """Norm, fused projections, heads that share keys, a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, kv = self.project(self.norm(x)).split(WIDTH, -1)
        k, v = kv.chunk(2, -1)
        q, k, v = (t.reshape(batch, length, -1, 2).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (x + self.out(y.transpose(1, 2).flatten(2))).softmax(1).square().sum()


class Experts(nn.Module):
    """Tokens that go to two of four experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, 12, WIDTH))
        self.down = nn.Parameter(torch.randn(4, WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = autopar.experts(x, chosen, weights, self.up, self.down, "gelu")
        return (x + y).square().mean()


class Sequence(nn.Module):
    """Causal attention alone, of queries with keys that fewer heads share."""

    def __init__(self) -> None:
        super().__init__()
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            self.register_parameter(name, nn.Parameter(torch.randn(2, heads, 8, 2)))

    def forward(self) -> Tensor:
        given = 2 * self.q, 2 * self.k, 2 * self.v
        return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True).tanh().sum()


class States(nn.Module):
    """Buffers that follow what is seen, dropout, a frozen scale, outputs beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.dropout(self.layer(x), 0.5) * self.scale
        self.last.copy_(y.detach().sum(0))
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return {"loss": (y - self.mean).square().mean(), "y": y, "sum": y.sum(0)}


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def layers() -> tuple[nn.Module, tuple[Any, ...]]:
    return Layers(), (floats(WIDTH, WIDTH),)


def bare() -> tuple[nn.Module, tuple[Any, ...]]:
    return Bare(), (floats(WIDTH, WIDTH),)


def vocabulary() -> tuple[nn.Module, tuple[Any, ...]]:
    ids, targets = (torch.randperm(CLASSES) for _ in range(2))
    targets[:3] = 5
    return Vocabulary(), (ids, targets)


def attention() -> tuple[nn.Module, tuple[Any, ...]]:
    return Attention(), (floats(4, 6, WIDTH),)


def experts() -> tuple[nn.Module, tuple[Any, ...]]:
    return Experts(), (floats(16, WIDTH),)


def sequence() -> tuple[nn.Module, tuple[Any, ...]]:
    return Sequence(), ()


def states() -> tuple[nn.Module, tuple[Any, ...]]:
    return States(), (floats(WIDTH, WIDTH),)


@dataclass(frozen=True)
class Case:
    """A model, and the plans it is verified under: with the decisions pinned on a mesh, or random
    ones by mesh and seed."""

    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    pinned: Iterable[tuple[str, Mapping[str, str]]] = ()
    random: Iterable[tuple[tuple[int, ...], int]] = field(default=())


SPREAD = [((2,), 0), ((2,), 1), ((2, 2), 2), ((4,), 3), ((2, 2), 4), ((2, 2), 5), ((2,), 6)]

CASES: dict[str, Case] = {
    "data parallel": Case(
        layers,
        [
            (
                "2",
                {
                    r"param:.*": "[R]|[R]",
                    r"(up|down):forward:mm\.0": "m",
                    r"(up|down|):forward:(add|gelu|mean)\.0": "d0",
                },
            )
        ],
    ),
    "tensor parallel": Case(
        layers,
        [
            (
                "2x2",
                {
                    r"param:up\.weight": "[R, S(0)]|[R, S(0)]",
                    r"param:down\.weight": "[R, S(1)]|[R, S(1)]",
                    r"up:forward:mm\.0": "m,n",
                    r"down:forward:mm\.0": "m,k",
                    r"down:forward:add\.0": "d0,-",
                    r":forward:(add|mean)\.0": "d0,-",
                    r"down:backward:mm\.0": "k,n",
                    r"down:backward:mm\.1": "m,n",
                },
            )
        ],
    ),
    "zero": Case(
        layers,
        [
            (
                "2x2",
                {
                    r"param:up\.weight": "[S(0), S(0)]|[S(0), S(0)]",
                    r"param:down\.weight": "[S(1), S(0)]|[S(1), S(0)]",
                    r"(up|down):forward:mm\.0": "m,m",
                    r"(up|down):backward:mm\.0": "k,k",
                },
            )
        ],
    ),
    "saved": Case(
        bare,
        [
            (
                "2",
                {
                    r"layer:forward:mm\.0": "k",
                    r":forward:gelu\.0": "-",
                    r"saved:layer:forward:mm\.0": "[R]",
                },
            )
        ],
    ),
    "vocabulary": Case(
        vocabulary,
        [
            (
                mesh,
                {
                    pattern: ",".join([label] * len(mesh.split("x")))
                    for pattern, label in {
                        r"table:forward:embedding.*": "v",
                        r"table:backward:embedding.*": "v",
                        r"head:forward:mm.*": "n",
                        r":.*:_log_softmax.*": "d1",
                        r":.*:nll_loss.*ward\.0": "c",
                    }.items()
                },
            )
            for mesh in ("2", "2x2")
        ],
    ),
    "experts": Case(
        experts,
        [
            (mesh, {r":(forward|backward):experts.*": choice})
            for mesh, choice in (("2", "exchange"), ("2x2", "n,exchange"))
        ],
    ),
    "ring": Case(sequence, [("4", {r":(forward|backward):sdpa(_backward)?\.0": "ring"})]),
    "zigzag": Case(
        sequence,
        [
            ("4", {r":(forward|backward):sdpa(_backward)?\.0": choice})
            for choice in ("ring_zigzag", "s_zigzag")
        ],
    ),
    "rows": Case(sequence, [("2x2", {r":(forward|backward):sdpa(_backward)?\.0": "s,s"})]),
    "layers": Case(layers, random=SPREAD),
    "attention": Case(attention, random=SPREAD),
    "states": Case(states, random=SPREAD),
}


@dataclass(frozen=True)
class Made:
    model: nn.Module
    args: tuple[Any, ...]
    traced: Traced
    plans: tuple[Plan, ...]


def make(name: str) -> Made:
    """A case, traced and planned."""
    case = CASES[name]
    with seeded(0):
        model, args = case.build()
        model = model.double()
        # Biases of 0 and scales of 1 would hide that one is used twice.
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    traced = trace(model, args)
    pinned = [plan_for(traced.graph, on, pins) for on, pins in case.pinned]
    drawn = [random_plan(traced.graph, mesh(*on), seed) for on, seed in case.random]
    return Made(model, args, traced, (*pinned, *drawn))


made_once = cache(make)


def verify(made: Made) -> None:
    """VerificationError if a step under some plan is not eager's."""
    for plan in made.plans:
        compare_program(
            rewritten(made.traced, plan),
            ModelCall(made.model, made.args, {}),
            tolerance=1e-9,
        ).check()
