"""Stages whose backward comes in two parts, with what is recomputed, offloaded, or at home on the
host: whatever that is, no gradient changes, and each part finds what it needs."""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.driver.search.segments import segments
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.offloading import offloadable
from autopar.ir.own_ops import is_copy
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.recompute import with_recompute
from autopar.ir.passes.stages import in_stages, in_two_parts
from autopar.ir.schedule import Start
from autopar.ir.uses import groups
from autopar.plans.pipeline_orders import make_schedule
from autopar.plans.plan import Plan
from autopar.plans.scheduling.events import schedule
from autopar.runtime.simulator.stages import SimulatedStage, train_step_in_stages
from tests.codegen.models import Case, make_case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_offload import Stack, in_blocks
from tests.codegen.test_random_plans import difference
from tests.codegen.test_recompute import candidates
from tests.codegen.test_residency import hosted_at_random
from tests.layouts import laid_out, simulated
from tests.planned import hostless
from tests.redone import redecided

LAYERS, ROWS, WIDTH = 12, 16, 8
TOLERANCE = 1e-10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Deep(nn.Module):
    """Enough layers that in each of two stages something has time to be away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def deep() -> Case:
    torch.manual_seed(0)
    return make_case(Deep().double(), {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64)})


def halves(microbatches: int) -> tuple[Graph, ...]:
    whole = in_microbatches(deep().traced.graph, microbatches)
    parts = segments(whole)
    return in_stages(whole, [parts[len(parts) // 2].start])


def planned(graph: Graph, on: Mesh, microbatches: int, seed: int) -> Plan:
    """A random plan of a stage in which some is recomputed, offloaded, and at home on the host."""
    draw = random.Random(seed)
    again = [key for key in candidates(graph) if draw.random() < 0.4]
    step = in_two_parts(with_recompute(graph, again))
    away = [key for key in offloadable(step, on) if draw.random() < 0.6]
    hosted = hosted_at_random(step, 0.3 * (seed % 2), seed)
    plan = random_plan(
        with_recompute(graph, again),
        on,
        seed,
        microbatches=microbatches,
        hosted=hosted,
        is_split=True,
    )
    structure = redecided(
        plan.structure, recompute=tuple(again), offloaded=tuple(away), reload_pace=1 << 16
    )
    return msgspec.structs.replace(plan, structure=structure)


@pytest.mark.breadth(5)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equal_to_eager(sizes: tuple[int, ...], seed: int, microbatches: int) -> None:
    found, on = deep(), in_blocks(*sizes)
    stages: list[SimulatedStage] = []
    for k, graph in enumerate(halves(microbatches)):
        plan = planned(graph, on, microbatches, 2 * seed + k)
        stages.append(simulated(found.traced, plan.structure.only, graph))
    assert any(stage.structure.recompute for stage in stages)
    assert any(stage.structure.offloaded for stage in stages)
    table = make_schedule("zb-h1", 2, microbatches)
    step = train_step_in_stages(
        stages, table, found.traced.graph, found.tensors, tolerance=TOLERANCE
    )
    assert step.gradients.keys() == found.gradients.keys()
    for parameter, expected in found.gradients.items():
        assert difference(step.gradients[parameter], expected) <= TOLERANCE, parameter


def test_each_part_brings_back_what_it_needs_first() -> None:
    """And what both need is on the device between them."""
    graph, on = halves(1)[1], in_blocks()
    step = in_two_parts(graph)
    plan = random_plan(graph, on, 0, is_split=True)
    away = tuple(offloadable(step, on))
    structure = redecided(plan.structure, offloaded=away, reload_pace=1 << 4)
    layout = laid_out(graph, structure.only)
    found = schedule(layout)
    border = layout.graph.second_part
    assert border is not None
    back = [
        {e.message.transfers[0].source.ref for e in events if _comes_back(e)}
        for events in (found.backward, found.weights)
    ]
    assert back[0] and back[1]
    assert back[0] == {each.root for each in layout.offloaded_tensors if each.first < border}
    assert back[1] == {each.root for each in layout.offloaded_tensors if each.first >= border}
    carried = {value.ref for value in found.carried if not value.on_host}
    on_host = {value.ref for value in found.carried if value.on_host}
    assert on_host == back[1] and not on_host & carried


def _comes_back(event: object) -> bool:
    return isinstance(event, Start) and event.message.kind == "reload"


def test_what_is_made_again_for_both_parts_is_held_between_them() -> None:
    graph = halves(1)[1]
    again = candidates(graph)
    plan = random_plan(with_recompute(graph, again), in_blocks(), 0, is_split=True)
    structure = redecided(plan.structure, recompute=tuple(again))
    layout = laid_out(graph, structure.only)
    border = layout.graph.second_part
    assert border is not None
    read = {
        group.root
        for group in groups(layout.graph)
        if is_copy(layout.graph.nodes[group.root.node])
        and group.root.node < border <= max(use.node for use in group.uses)
    }
    assert read and read <= {value.ref for value in schedule(layout).carried}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_random_numbers_and_running_statistics(schedule: str) -> None:
    """Dropout draws what eager draws, and batch norm counts what eager counts."""
    torch.manual_seed(0)
    inputs = (torch.randn(ROWS, WIDTH),)
    plan = autopar.plan(
        Stack().train(),
        inputs,
        cluster=hostless("4xH100"),
        pipeline={"stages": 2, "schedule": schedule},
        microbatches=1,
    )
    report = autopar.verify(plan, Stack().train(), inputs)
    assert max(each.relative for each in report.differences) <= report.tolerance
