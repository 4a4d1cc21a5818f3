"""What a device is predicted to hold for all of its stages is what its rank holds while all of them
run, action by action, when the prediction says; or a little more, but never less."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.cluster.parsing import parse_cluster
from autopar.compile import rewritten
from autopar.driver.planning import answer
from autopar.driver.training.stage_binding import StageBinder
from autopar.ir.pipeline import Action
from autopar.plans.pipelines import simulate_pipeline
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.read_options import read_schedule
from autopar.plans.requests.request import make_graph_request
from autopar.runtime.process.world import World
from autopar.runtime.program import pipelined, stage_messages
from autopar.runtime.program.meter import Meter
from autopar.solver.search import silent
from tests.held import Held
from tests.runtime.test_pipelined import Queues, check
from tests.zoo.cases import ZooCase, trained
from tests.zoo.test_stages import LOOPED

MOST = 1.03
LEAST = {"zb-v": 0.99}
"""Of a stage in the middle, in two parts: its first part holds two small tensors longer than its
schedule says."""

TURNS = 4


def planned(found: ZooCase, schedule: str, ranks: int, stages: int) -> Plan:
    """A plan of so many stages on so many devices, whose allocator rounds nothing."""
    cluster = parse_cluster(f"{ranks}xH100")
    cluster = replace(cluster, device=replace(cluster.device, granule_bytes=1))
    options = Options(
        PlanOptions(backend="eager"),
        mesh="1",
        stages=stages,
        microbatches=TURNS,
        schedule=read_schedule(schedule),
    )
    return answer(make_graph_request(found.traced.graph, cluster, options), silent)


class OnTime:
    """Ranks take and give what they send each other in the order of the predicted step."""

    def __init__(self, plan: Plan) -> None:
        structure, estimates = plan.structure, plan.estimates
        table = structure.actions
        spans = simulate_pipeline(table, estimates.stages, estimates.delays, ()).spans
        self.times = {(a, is_end): span[is_end] for a, span in spans.items() for is_end in (0, 1)}
        self.left = {each for each in self.times if each[0].kind is not pipelined.Pass.WEIGHTS}
        self.changed = threading.Condition()

    def wait(self, action: Action, is_end: int) -> None:
        """Until all is done that comes before."""
        now = self.times[action, is_end]
        with self.changed:
            while any(self.times[each] < now for each in self.left):
                assert self.changed.wait(30)

    def done(self, action: Action, is_end: int) -> None:
        with self.changed:
            self.left.discard((action, is_end))
            self.changed.notify_all()


def held_by_ranks(found: ZooCase, plan: Plan, patch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes that each rank holds in a step, beside parameters and what belongs to them."""
    compiled = rewritten(found.traced, plan)
    ranks, device = plan.structure.num_ranks, torch.device("cpu")
    queues = Queues(is_seen=True)
    queues.pending = {}
    lines: list[pipelined.RankSchedule] = []
    for rank in range(ranks):
        world = World(rank, ranks, device)
        line = StageBinder(compiled, None, world, "eager", Meter(device)).rank_schedule()
        lines.append(replace(line, channels=queues.of(rank)))
    steps: list[OnTime] = []
    take, give = stage_messages.StageMessages.take, stage_messages.StageMessages.give

    def takes(self: stage_messages.StageMessages, action: Action) -> dict[str, Tensor]:
        steps[-1].wait(action, 0)
        taken = take(self, action)
        steps[-1].done(action, 0)
        return taken

    def gives(
        self: stage_messages.StageMessages, action: Action, sent: Mapping[Any, Tensor]
    ) -> None:
        steps[-1].wait(action, 1)
        give(self, action, sent)
        steps[-1].done(action, 1)

    patch.setattr(stage_messages.StageMessages, "take", takes)
    patch.setattr(stage_messages.StageMessages, "give", gives)
    peaks, made = [0] * ranks, list[Any]([None] * ranks)

    def work(rank: int) -> None:
        line = lines[rank]
        given = {n: found.tensors[n] for n in line.inputs}
        tangents = {n: torch.ones((), dtype=torch.float64) for n in line.tangent_dtypes}
        names = {n for p in line.programs.values() for n in (*p.forward_inputs, *p.backward_inputs)}
        there = [x for n, x in (given | tangents).items() if n in names and "param:" not in n]
        try:
            with torch.no_grad(), Held((*given.values(), *tangents.values())) as held:
                made[rank] = pipelined.run_rank_schedule(line, given, tangents)
            peaks[rank] = sum(x.nbytes for x in there) + held.peak
        except BaseException as error:  # told by `check`
            made[rank] = error

    for _ in range(2):  # What comes next is asked for from the second step on.
        steps.append(OnTime(plan))
        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        check(found, made)
    return peaks


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages"),
    [
        ("1f1b", 2, 2),
        ("gpipe", 2, 2),
        ("interleaved:2", 2, 4),
        ("zb-h1", 2, 2),
        ("zb-v", 2, 4),
        ("zb:2", 2, 4),
        (LOOPED, 2, 4),
        ("interleaved:2", 1, 2),
    ],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.nightly)])
def test_what_is_predicted_for_a_device_is_held(
    name: str, schedule: str, ranks: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(name)
    plan = planned(found, schedule, ranks, stages)
    held = held_by_ranks(found, plan, monkeypatch)
    for memory, peak in zip(plan.estimates.devices, held, strict=True):
        static = memory.params + memory.gradients + memory.optimizer
        held_bytes = static + peak
        assert LEAST.get(schedule, 1.0) * held_bytes <= memory.total <= MOST * held_bytes
