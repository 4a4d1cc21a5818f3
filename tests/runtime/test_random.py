"""Dropout of a compiled model: the mask of one device, in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.compile import ModelCall, rewritten
from autopar.driver.verify import compare_program
from autopar.ir.graph import Role
from autopar.runtime.program.random import draws
from autopar.runtime.simulator.eager_step import seeded, whole_tensors
from autopar.runtime.simulator.interpreter import run
from autopar.tracer import Traced, trace
from tests.layouts import program_of
from tests.planned import on_h100, plan_for

ROWS, WIDTH = 8, 6


class Dropped(nn.Module):
    """Ones of which half are dropped, as they are and times a weight."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(F.dropout(x @ self.weight, 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        return y.square().mean(), F.dropout(x, 0.5).detach()


X = torch.ones(ROWS, WIDTH, dtype=torch.float64)
ROWS_ON_THE_SLOW_AXIS = {
    r":forward:mm\.0": "m,-",
    r":forward:mul\.\d|:forward:tanh\.0": "d0,-",
    r"detached:1": "[S(0), R]",
}


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(Dropped(), (X,))


def held(traced: Traced, seed: int) -> list[Tensor]:
    """What each of 2 x 2 ranks holds of the ones that were not dropped: rows, by the slow axis."""
    plan = plan_for(traced.graph, "2x2", ROWS_ON_THE_SLOW_AXIS)
    program = program_of(traced, plan.structure.only)
    assert draws(program.forward)
    (node,) = traced.graph.with_role(Role.DETACHED)
    assert str(program.detached_shardings[int(node.target)]) == "[S(0), R]"
    given = whole_tensors(Dropped(), (X,), {})
    with seeded(seed), torch.no_grad():
        ranks = [[given[name] for name in program.forward_inputs] for _ in range(4)]
        results = run(program.forward, on_h100("2x2")[1], ranks)
    at = program.forward_outputs.index(f"detached:{node.target}")
    return [result[at] for result in results]


def test_replicas_drop_the_same_and_shards_do_not(traced: Traced) -> None:
    first, replica, second, other = held(traced, 0)
    assert torch.equal(first, replica)
    assert torch.equal(second, other)
    assert first.shape == (ROWS // 2, WIDTH)
    assert not torch.equal(first, second)
    assert set(torch.cat([first, second]).flatten().tolist()) == {0.0, 2.0}


def test_a_seed_repeats_what_is_dropped_and_another_does_not(traced: Traced) -> None:
    assert all(map(torch.equal, held(traced, 0), held(traced, 0)))
    assert not all(map(torch.equal, held(traced, 0), held(traced, 1)))


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_what_a_model_recomputes_has_the_mask_of_its_forward(mesh: str) -> None:
    """Under `torch.utils.checkpoint` eager draws again what it drew; here it is drawn once."""
    model = Dropped(again=True)
    traced = trace(model, (X,))
    drawn = [node for node in traced.graph.nodes if node.op == "aten.native_dropout.default"]
    assert len(drawn) == 2
    plan = plan_for(traced.graph, mesh, {r":forward:mm\.0": "m" if mesh == "2" else "m,n"})
    compare_program(
        rewritten(traced, plan),
        ModelCall(model, (X,), {}),
        tolerance=1e-9,
    ).check()


UNUSED: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of channels": lambda x: F.dropout1d(x[None], 0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "rand_like": torch.rand_like,
    "randn": lambda _: torch.randn(3),
    "randint": lambda _: torch.randint(0, 5, (4,)),
    "randperm": lambda _: torch.randperm(7),
    "bernoulli": lambda _: torch.bernoulli(torch.full((5,), 0.3)),
    "multinomial": lambda _: torch.multinomial(torch.ones(5), 2),
    "normal": lambda _: torch.normal(torch.zeros(4), torch.ones(4)),
    "uniform_": lambda x: x.detach().clone().uniform_(),
    "bernoulli_": lambda _: torch.empty(4).bernoulli_(0.4),
    "exponential_": lambda _: torch.empty(4).exponential_(),
}


class Blocks(nn.Module):
    """Blocks that draw what they do not use, and then what they do."""

    def __init__(self, unused: Callable[[Tensor], Any], count: int = 1, again: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(count))
        self.unused = unused
        self.again = again

    def body(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(layer(x))
        self.unused(x)
        return F.dropout(x, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.again:
                x = checkpoint(self.body, layer, x, use_reentrant=False)
            else:
                x = self.body(layer, x)
        return x.square().mean()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("unused", UNUSED.values(), ids=list(UNUSED))
def test_what_is_drawn_and_not_used_moves_no_mask(unused: Callable[[Tensor], Any]) -> None:
    check_blocks(Blocks(unused), "2")


@pytest.mark.parametrize("again", [False, True])
def test_what_blocks_that_repeat_draw_and_do_not_use_moves_no_mask(again: bool) -> None:
    check_blocks(Blocks(UNUSED["dropout"], 5, again), "2x2")


def check_blocks(model: nn.Module, on: str) -> None:
    traced = trace(model, (X,))
    plan = plan_for(traced.graph, on)
    compare_program(
        rewritten(traced, plan),
        ModelCall(model, (X,), {}),
        tolerance=1e-9,
    ).check()


@pytest.mark.parametrize("again", [False, True])
def test_a_run_of_steps_draws_what_eager_draws(again: bool) -> None:
    """After a step the generator is where eager leaves it."""
    eager = Blocks(UNUSED["rand_like"], 4, again)
    compiled = autopar.compile(copy.deepcopy(eager))
    losses: list[list[Tensor]] = []
    for model in (eager, compiled):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(X)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
