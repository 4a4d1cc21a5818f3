"""Models of the zoo under any plan in stages, compared with eager."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.codegen import generate
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.microbatches import in_microbatches
from autopar.ir.stages import in_stages
from autopar.plans.pipeline_orders import make_table
from autopar.runtime.simulator.stages import SimulatedStage, train_step_in_stages
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.zoo.cases import ZooCase
from tests.zoo.equality import TOLERANCE, assert_step_is_eager


def any_cuts(graph: Graph, count: int, seed: int) -> list[int]:
    """Ops of forward, wherever they stand."""
    ops = graph.with_role(Role.OP)
    places = [n.index for n in ops if n.phase is Phase.FORWARD and not n.view]
    return sorted(random.Random(seed).sample(places[1:], count))


def check_stages(
    found: ZooCase,
    cuts: Sequence[int],
    turns: int,
    schedule: str,
    seed: int,
    meshes: Sequence[tuple[int, ...]],
) -> None:
    """Stages that begin at `cuts`, each under a random plan on its own mesh, compute what eager
    computes."""
    traced = found.traced
    chunks = {"interleaved": 2, "zb-v": 2}.get(schedule, 1)
    count = (len(cuts) + 1) // chunks
    table = make_table(schedule, count, turns, chunks if schedule == "interleaved" else 1)
    stages: list[SimulatedStage] = []
    for k, graph in enumerate(in_stages(in_microbatches(traced.graph, turns), cuts)):
        on = mesh(*meshes[k % len(meshes)])
        plan = random_plan(graph, on, seed + k, microbatches=turns, is_split=table.is_split)
        program = generate(traced.gm, traced.graph, plan, graph)
        stages.append(SimulatedStage(on, graph, plan.structure, program))
    step = train_step_in_stages(stages, table, traced.graph, found.tensors, tolerance=TOLERANCE)
    assert_step_is_eager(found, step)
