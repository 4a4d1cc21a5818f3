"""What is offloaded, whatever that is and however it is laid out, changes no gradient, and is off
the device meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph, Phase
from autopar.ir.mesh import Mesh
from autopar.ir.offloading import offloadable, offloaded
from autopar.ir.passes.recompute import with_recompute
from autopar.plans.plan import Plan
from autopar.plans.scheduling.events import schedule
from autopar.runtime.simulator.spmd import StepResult, train_step
from tests.codegen.events import check_order, watched
from tests.codegen.meshes import mesh
from tests.codegen.models import Case, case, make_case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_events import played
from tests.codegen.test_random_plans import TOLERANCE, difference
from tests.codegen.test_recompute import candidates
from tests.layouts import laid_out, program_of
from tests.live_bytes import measured
from tests.plans.test_scheduling import check
from tests.redone import redecided

LAYERS, ROWS, WIDTH = 6, 16, 8


def in_blocks(*sizes: int) -> Mesh:
    """A mesh whose buckets are so small that each module of a list is a block."""
    return Mesh(tuple(replace(axis, bucket_bytes=1) for axis in mesh(*sizes or (1,))))


def planned(graph: Graph, on: Mesh, seed: int, away: Sequence[str], again: Sequence[str]) -> Plan:
    """A random plan with these decisions."""
    plan = random_plan(with_recompute(graph, again), on, seed)
    structure = redecided(
        plan.structure, recompute=tuple(again), offloaded=tuple(away), reload_pace=1 << (8 * seed)
    )
    return msgspec.structs.replace(plan, structure=structure)


def ran(found: Case, plan: Plan, tolerance: float) -> StepResult:
    graph, on = found.traced.graph, plan.structure.only.mesh
    layout = laid_out(graph, plan.structure.only)
    whole = schedule(layout)
    for microbatch in (whole.before, replace(whole, before=None, microbatches=1)):
        if microbatch is not None:
            check(layout.graph, microbatch)
    with watched() as written:
        program = program_of(found.traced, plan.structure.only, graph)
    check_order(written, program, on.names)
    torch.manual_seed(0)
    return train_step(program, on, graph, plan.structure.only, found.tensors, tolerance=tolerance)


@pytest.mark.breadth(5)
@pytest.mark.parametrize(("seed", "part"), [(0, 0.3), (1, 0.6), (2, 1.0)])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_equal_to_eager(name: str, sizes: Sequence[int], seed: int, part: float) -> None:
    """Beside what is recomputed."""
    found, on, draw = case(name), in_blocks(*sizes), random.Random(seed)
    graph = found.traced.graph
    again = [key for key in candidates(graph) if draw.random() < 0.4 * seed / 2]
    known = [*offloadable(with_recompute(graph, again), on)]
    away = [key for key in known if draw.random() < part] or known
    assert away
    step = ran(found, planned(graph, on, seed, away, again), TOLERANCE[name])
    assert step.gradients.keys() == found.gradients.keys()
    for parameter, expected in found.gradients.items():
        assert difference(step.gradients[parameter], expected) <= TOLERANCE[name], parameter


class Block(nn.Module):
    """Draws random numbers and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.linear(x)).tanh())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def stack() -> Case:
    torch.manual_seed(0)
    return make_case(Stack().train(), {"x": torch.randn(ROWS, WIDTH)})


@pytest.mark.breadth(2)
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
def test_equal_to_the_same_plan_without_it(sizes: Sequence[int]) -> None:
    """To the last bit, the masks of dropout and what batch norm counts among it."""
    found, on = stack(), in_blocks(*sizes)
    graph = found.traced.graph
    known = offloadable(graph, on)
    assert any("dropout" in key for key in known) and any("norm" in key for key in known)
    plain, away = (ran(found, planned(graph, on, 3, keys, ()), 0.0) for keys in ((), (*known,)))
    for expected, got in ((plain.outputs, away.outputs), (plain.gradients, away.gradients)):
        assert expected.keys() == got.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


def test_what_is_near_the_turn_stays() -> None:
    """A block's tensors come and go while two others are computed."""
    graph, on = stack().traced.graph, in_blocks()
    for key, away in offloadable(graph, on).items():
        if ":forward:tanh" in key:
            modules = [graph.nodes[each.root.node].module for each in away]
            assert modules == [f"layers.{k}" for k in range(LAYERS - 2)]
    with pytest.raises(ValueError, match="nothing cannot be offloaded"):
        offloaded(graph, on, ["nothing"])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_what_is_played_is_held(sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the storages of rank 0 while its graphs run: never under, and most of what is
    offloaded is neither held when forward ends nor in backward."""
    found, on = stack(), in_blocks(*sizes)
    graph = found.traced.graph
    keys = (*offloadable(graph, on),)
    held: list[tuple[int, int]] = []
    for away in ((), keys):
        plan = planned(graph, on, 3, away, ())
        counted = measured(program_of(found.traced, plan.structure.only, graph), graph, plan)
        for mine, theirs in zip(played(graph, plan, monkeypatch), counted, strict=True):
            assert theirs <= mine <= 1.1 * theirs
        held.append(counted)
    layout = laid_out(graph, planned(graph, on, 3, keys, ()).structure.only)
    num_bytes = sum(
        layout.held_bytes(a.root, layout.for_backward(a.root)) for a in layout.offloaded_tensors
    )
    for before, after in zip(*held, strict=True):
        assert after <= before - num_bytes / 2


def test_phases() -> None:
    """Forward copies nothing back, and backward nothing away."""
    graph, on = stack().traced.graph, in_blocks()
    layout = laid_out(graph, planned(graph, on, 0, (*offloadable(graph, on),), ()).structure.only)
    found = schedule(layout)
    assert {value.phase for value in found.saved} == {Phase.FORWARD}
    assert sum(value.on_host for value in found.saved) == len(layout.offloaded_tensors)
