"""What backward draws once more is what forward drew, however it is laid out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.ir.graph import Graph, Phase
from autopar.ir.own_ops import DRAW, STATE, is_copy, is_optional
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.recompute import STATE_BYTES, redrawable, with_recompute
from autopar.plans.plan import Plan
from autopar.plans.scheduling.bucketing import work
from autopar.runtime.simulator.spmd import train_step
from tests.codegen.meshes import mesh
from tests.codegen.models import Case, make_case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_random_plans import difference
from tests.codegen.test_recompute import candidates
from tests.layouts import program_of
from tests.live_bytes import measured
from tests.redone import redecided

ROWS, WIDTH, TOLERANCE = 8, 4, 1e-9


class Drawing(nn.Module):
    """Draws in all ways that are left of it: masks, of memory in another order too, of channels,
    noise, and, at the `end`, what depends on what was computed."""

    def __init__(self, end: bool = False) -> None:
        super().__init__()
        self.end = end
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.dropout(torch.tanh(x @ weight), 0.5)
            x = x + F.dropout(x.t(), 0.3).t() * torch.rand_like(x.t()).t()
            x = F.dropout1d(x[None], 0.2)[0] * torch.randn(WIDTH, dtype=x.dtype).exp()
            x = F.alpha_dropout(x, 0.2, training=True) * torch.empty_like(x).uniform_(1, 2)
        if self.end:
            x = x * torch.bernoulli(torch.sigmoid(x))
        return x.square().mean()


@cache
def drawing(end: bool = False) -> Case:
    torch.manual_seed(0)
    model, kwargs = Drawing(end), {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)}
    torch.manual_seed(1)
    loss = model(**kwargs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = make_case(model, kwargs)
    return Case(found.traced, found.tensors, loss.detach(), gradients, {})


def planned(
    graph: Graph, sizes: Sequence[int], seed: int, microbatches: int, keys: list[str]
) -> Plan:
    step = with_recompute(in_microbatches(graph, microbatches), keys)
    plan = random_plan(step, mesh(*sizes), seed, microbatches=microbatches)
    return msgspec.structs.replace(plan, structure=redecided(plan.structure, recompute=tuple(keys)))


def targets(gm: fx.GraphModule | None) -> list[str]:
    assert gm is not None
    return [str(node.target) for node in gm.graph.nodes]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("seed", "part", "microbatches"), [(0, 0.4, 1), (1, 1.0, 1), (2, 1.0, 2)])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
def test_equal_to_eager(sizes: Sequence[int], seed: int, part: float, microbatches: int) -> None:
    found, choose = drawing(end=microbatches == 1), random.Random(seed)
    graph = found.traced.graph
    keys = [key for key in candidates(graph) if choose.random() < part]
    plan = planned(graph, sizes, seed, microbatches, keys)
    program = program_of(found.traced, plan.structure.only, graph)
    backward = targets(program.backward)
    assert any("autopar.redraw_" in each for each in backward)
    assert not any(each.startswith("autopar.draw_") for each in backward)
    torch.manual_seed(1)
    step = train_step(
        program, mesh(*sizes), graph, plan.structure.only, found.tensors, tolerance=TOLERANCE
    )
    assert difference(step.outputs["loss:0"], found.loss) <= TOLERANCE
    for name, expected in found.gradients.items():
        assert difference(step.gradients[name], expected) <= TOLERANCE, name


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_generator_ends_where_eager_leaves_it(microbatches: int) -> None:
    found = drawing()
    graph = found.traced.graph
    ends: list[Tensor] = []
    for keys in ([], candidates(graph)):
        plan = planned(graph, (2,), 0, microbatches, keys)
        program = program_of(found.traced, plan.structure.only, graph)
        torch.manual_seed(1)
        train_step(program, mesh(2), graph, plan.structure.only, found.tensors, tolerance=TOLERANCE)
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


def test_what_depends_on_the_step_is_drawn_once() -> None:
    graph = drawing(end=True).traced.graph
    drawn = [node for node in graph.nodes if node.random]
    (once,) = [node for node in drawn if node.index not in redrawable(graph)]
    assert once.op == "aten.bernoulli.default"
    with pytest.raises(ValueError, match="cannot be recomputed"):
        with_recompute(graph, [once.key])


def test_a_graph_says_what_is_drawn_from_which_state() -> None:
    graph = drawing().traced.graph
    drawn = [key for key in candidates(graph) if "native_dropout" in key]
    for found in (with_recompute(graph, drawn), with_recompute(graph, None)):
        found.check()
        draws = [node for node in found.nodes if node.op == DRAW]
        assert {node.phase for node in draws} == {Phase.FORWARD, Phase.BACKWARD}
        for node in draws:
            assert is_copy(node) or is_optional(node) or node.phase is Phase.FORWARD
            state = found.nodes[node.inputs[-1].node]
            assert state.op == STATE and state.phase is Phase.FORWARD


def test_a_state_is_saved_for_a_mask() -> None:
    """What is held is as much less as a mask is larger than a state."""
    side = 256
    model = nn.Sequential(nn.Linear(side, side), nn.Dropout(0.5), nn.Tanh(), nn.Linear(side, 1))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean()

    found = make_case(Loss().train(), {"x": torch.randn(side, side)})
    graph = found.traced.graph
    keys = [key for key in candidates(graph) if "dropout" in key or "ones" in key]
    assert keys
    saved = {}
    for again in ([], keys):
        plan = planned(graph, (), 0, 1, again)
        program = program_of(found.traced, plan.structure.only, graph)
        held = measured(program, graph, plan)
        saved[bool(again)] = _saved_bytes(program.forward, program.forward_outputs, found)
        assert min(held) > 0
    assert saved[False] - saved[True] == side * side - STATE_BYTES


def _saved_bytes(gm: fx.GraphModule, names: Sequence[str], found: Case) -> int:
    given = found.tensors
    inputs: list[Any] = [
        given[node.name] if node.name in given else given[_named(node.name, given)]
        for node in gm.graph.nodes
        if node.op == "placeholder"
    ]
    with torch.no_grad():
        made = gm(inputs)
    seen = {x.data_ptr(): x.untyped_storage().nbytes() for x in inputs}
    kept = {
        x.data_ptr(): x.untyped_storage().nbytes()
        for name, x in zip(names, made, strict=True)
        if name.startswith("saved:") and x.data_ptr() not in seen
    }
    return sum(kept.values())


def _named(name: str, given: dict[str, Tensor]) -> str:
    plain = name.rpartition("__")[0]
    return next(n for n in given if "".join(c if c.isalnum() else "_" for c in n) == plain)


def test_a_draw_is_work_for_what_it_makes() -> None:
    """What hides behind it, as a copy from the host, would else come too late."""
    graph = drawing().traced.graph
    for node in graph.nodes:
        if node.random:
            assert work(graph, node) == sum(prod(tensor.shape) for tensor in node.outputs)
