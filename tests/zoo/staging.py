"""Models of the zoo under any plan in stages, compared with eager."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import in_stages
from autopar.ir.pipeline import Action, Pass, PipelineSchedule, hops_in_sequence, incoming, needs
from autopar.plans.pipeline_orders import IN_CHUNKS, STAGES_PER_RANK, make_schedule
from autopar.runtime.simulator.stages import SimulatedStage, train_step_in_stages
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.layouts import simulated
from tests.zoo.cases import ZooCase
from tests.zoo.equality import TOLERANCE, assert_step_is_eager


def any_cuts(graph: Graph, count: int, seed: int) -> list[int]:
    """Ops of forward, wherever they stand."""
    ops = graph.with_role(Role.OP)
    places = [n.index for n in ops if n.phase is Phase.FORWARD and not n.view]
    return sorted(random.Random(seed).sample(places[1:], count))


def any_table(
    ranks: Mapping[int, int], microbatches: int, seed: int, *, is_split: bool
) -> PipelineSchedule:
    """An order of stages, which are on these `ranks`, in which none waits for ever: microbatches
    come in any order, forward and backward."""
    kinds = list(Pass) if is_split else [Pass.FORWARD, Pass.BACKWARD]
    left = [Action(s, kind, m) for s in ranks for kind in kinds for m in range(microbatches)]
    rows: list[list[Action]] = [[] for _ in {*ranks.values()}]
    draw, sources = random.Random(seed), incoming(hops_in_sequence(len(ranks)))
    done: set[Action] = set()
    while left:
        ready = [a for a in left if all(each in done for each, _ in needs(a, sources))]
        action = draw.choice(ready)
        rows[ranks[action.stage]].append(action)
        left.remove(action)
        done.add(action)
    table = PipelineSchedule(tuple(map(tuple, rows)))
    table.check()
    return table


def check_stages(
    found: ZooCase,
    cuts: Sequence[int],
    microbatches: int,
    schedule: str | PipelineSchedule,
    seed: int,
    meshes: Sequence[tuple[int, ...]],
) -> None:
    """Stages that begin at `cuts`, each under a random plan on its own mesh, compute what eager
    computes."""
    traced = found.traced
    if isinstance(schedule, PipelineSchedule):
        table = schedule
    else:
        chunks = STAGES_PER_RANK.get(schedule, 2 if schedule in IN_CHUNKS else 1)
        ranks, of_name = (len(cuts) + 1) // chunks, chunks if schedule in IN_CHUNKS else 1
        table = make_schedule(schedule, ranks, microbatches, of_name)
    stages: list[SimulatedStage] = []
    for k, graph in enumerate(in_stages(in_microbatches(traced.graph, microbatches), cuts)):
        on = mesh(*meshes[k % len(meshes)])
        plan = random_plan(graph, on, seed + k, microbatches=microbatches, is_split=table.is_split)
        stages.append(simulated(traced, plan.structure.only, graph))
    step = train_step_in_stages(stages, table, traced.graph, found.tensors, tolerance=TOLERANCE)
    assert_step_is_eager(found, step)
