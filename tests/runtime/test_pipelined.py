"""Ranks of a pipeline as threads, each with one stage or several: what they make of messages that
come in the order of their senders."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from queue import Queue
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile import Compiled
from autopar.driver.search.segments import segments
from autopar.driver.training.stage_binding import StageBinder
from autopar.ir.graph import Graph
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import in_stages
from autopar.plans.pipeline_orders import IN_CHUNKS
from autopar.plans.requests.options import is_written_out
from autopar.runtime.process.world import World
from autopar.runtime.program import pipelined, stage_messages
from autopar.runtime.program.meter import Meter
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.layouts import compiled_from, simulated
from tests.redone import redecided
from tests.report.plans import Order, in_order
from tests.zoo.cases import ZooCase, trained
from tests.zoo.test_stages import LOOPED

TOLERANCE = 1e-9


class Sent:
    """What a message waits for: that it has come."""

    def __init__(self, wait: Any, has_come: Any = lambda: False) -> None:
        self.wait, self.is_completed = wait, has_come


class Queues:
    """Ways between threads; a message is copied when it is received, as late as may be. Whether it
    has come is not seen, unless it `is_seen`."""

    def __init__(self, *, is_seen: bool = False) -> None:
        self.is_seen = is_seen
        self.ways: dict[tuple[int, int], Queue[tuple[Tensor, threading.Event]]] = {}
        self.lock = threading.Lock()

    def way(self, source: int, target: int) -> Queue[tuple[Tensor, threading.Event]]:
        with self.lock:
            return self.ways.setdefault((source, target), Queue())

    def of(self, rank: int) -> Any:
        queues = self

        class Ours:
            def send(self, target: int, tensor: Tensor) -> Sent:
                come = threading.Event()
                queues.way(rank, target).put((tensor, come))
                return Sent(lambda: None, come.is_set if queues.is_seen else lambda: False)

            def break_off(self) -> None: ...

            def receive(self, source: int, tensor: Tensor) -> Sent:
                # In the order of asking, as a backend has it.
                mine = threading.Event()
                pending = queues.pending.setdefault((source, rank), [])
                pending.append((mine, tensor))

                def wait() -> None:
                    while not mine.is_set():
                        event, into = pending.pop(0)
                        got, come = queues.way(source, rank).get(timeout=20)
                        into.view(got.shape).copy_(got)
                        del got
                        come.set()
                        event.set()

                return Sent(wait)

        return Ours()

    pending: dict[tuple[int, int], list[tuple[threading.Event, Tensor]]]


def compiled_in(
    found: ZooCase, starts: Sequence[int], microbatches: int, schedule: str, chunks: int
) -> Compiled:
    traced = found.traced
    graphs = in_stages(in_microbatches(traced.graph, microbatches), starts)
    ranks = len(graphs) // chunks
    order = Order(f"{schedule}:{chunks}" if schedule in IN_CHUNKS else schedule, microbatches)
    if is_written_out(schedule):
        order = Order("table", microbatches, tuple(schedule.strip().splitlines()))
    table = order.actions(ranks)
    plans = [
        random_plan(graph, mesh(), 0, microbatches=microbatches, is_split=table.is_split)
        for graph in graphs
    ]
    pairs = zip(plans, graphs, strict=True)
    simulations = [simulated(traced, plan.structure.only, graph) for plan, graph in pairs]
    stages = tuple(
        msgspec.structs.replace(plan.structure.only, first_rank=table.ranks[k])
        for k, plan in enumerate(plans)
    )
    whole = plans[0]
    structure = redecided(whole.structure, stages=stages)
    plan = in_order(msgspec.structs.replace(whole, structure=structure), order)
    return compiled_from(traced, plan, simulations)


def run_threads(name: str, microbatches: int, schedule: str, count: int, chunks: int = 1) -> None:
    """A model of the zoo in stages on threads computes what eager computes."""
    found = trained(name)
    graph: Graph = in_microbatches(found.traced.graph, microbatches)
    parts = segments(graph)
    starts = [parts[k * len(parts) // count].start for k in range(1, count)]
    compiled = compiled_in(found, starts, microbatches, schedule, chunks)
    queues = Queues()
    queues.pending = {}
    ranks = count // chunks
    made: list[Any] = [None] * ranks

    device = torch.device("cpu")
    lines: list[pipelined.RankSchedule] = []
    for rank in range(ranks):
        world = World(rank, ranks, device)
        line = StageBinder(compiled, None, world, "eager", Meter(device)).rank_schedule()
        lines.append(replace(line, channels=queues.of(rank)))

    def work(rank: int) -> None:
        line = lines[rank]
        given = {n: found.tensors[n] for n in line.inputs}
        tangents = {n: torch.ones((), dtype=torch.float64) for n in line.tangent_dtypes}
        try:
            with torch.no_grad():
                made[rank] = pipelined.run_rank_schedule(line, given, tangents)
        except Exception as error:  # told by `check`
            made[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check(found, made)


def check(found: ZooCase, made: Sequence[Any]) -> None:
    gradients: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    for each in made:
        assert not isinstance(each, Exception) and each is not None, each
        results, terms = each
        losses |= {n: x for n, x in results.items() if n in found.outputs and n.startswith("loss")}
        for name, term in terms.items():
            if term.numel():
                known = gradients.get(name.partition(":")[2])
                gradients[name.partition(":")[2]] = term if known is None else known + term
    assert losses
    for name, expected in found.gradients.items():
        close(gradients[name], expected, name)


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    scale = max(float(theirs.abs().max()), 1e-6)
    assert float((ours - theirs).abs().max()) <= TOLERANCE * scale, name


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("name", "microbatches", "schedule", "count", "chunks"),
    [
        ("llama", 4, "1f1b", 3, 1),
        ("gpt2", 4, "gpipe", 2, 1),
        ("gpt2", 4, "eager-1f1b", 3, 1),
        ("t5", 4, "1f1b", 3, 1),
        ("llama", 4, "interleaved", 4, 2),
        ("resnet", 1, "1f1b", 3, 1),
        ("unet", 2, "1f1b", 3, 1),
        ("gpt2", 4, "zb-h1", 2, 1),
        ("llama", 4, "zb-v", 4, 2),
        ("resnet", 1, "zb-h1", 3, 1),
        ("llama", 4, "zb", 4, 2),
        ("gpt2", 4, LOOPED, 4, 2),
    ],
)
def test_ranks_compute_together(
    name: str, microbatches: int, schedule: str, count: int, chunks: int
) -> None:
    run_threads(name, microbatches, schedule, count, chunks)


class Deep(nn.Module):
    """Four layers alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["interleaved:2", "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"])
def test_one_device_has_all_stages(schedule: str) -> None:
    plain = Deep()
    ours: Any = autopar.compile(
        copy.deepcopy(plain), cluster="1xcpu", pipeline={"stages": 2, "schedule": schedule}
    )
    for seed in (1, 2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        losses = [model(x) for model in (ours, plain)]
        for loss in losses:
            loss.backward()
        assert torch.allclose(*losses)
    assert len(ours.plans[0].structure.stages) == 2
    for name, param in ours.named_parameters():
        expected = plain.get_parameter(name).grad
        assert expected is not None and torch.allclose(param.grad, expected, atol=1e-6), name


def test_sent_tensors_are_let_go_while_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    give = stage_messages.StageMessages.give

    def counted(self: stage_messages.StageMessages, *given: Any) -> None:
        nonlocal most
        give(self, *given)
        most = max(most, sum(map(len, self._under_way.values())))

    monkeypatch.setattr(stage_messages.StageMessages, "give", counted)
    run_threads("llama", 4, "1f1b", 2)
    one_f_one_b, most = most, 0
    run_threads("llama", 4, "gpipe", 2)
    assert one_f_one_b < most
