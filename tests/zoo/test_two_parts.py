"""Stages whose backward comes in two parts: steps are eager's, nothing is under way between the
parts, and what waits is what is said to wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from autopar.driver.search.segments import segments
from autopar.ir.graph import Graph, Phase, Role
from autopar.ir.own_ops import SEND
from autopar.ir.passes.microbatches import in_microbatches
from autopar.ir.passes.stages import in_stages
from autopar.ir.schedule import Compute, Schedule, Start, Take, Value, Wait
from autopar.plans.layout import Layout
from autopar.plans.pipeline_orders import make_schedule
from autopar.plans.plan import Plan
from autopar.plans.scheduling.events import schedule
from autopar.runtime.program.microbatch_run import MicrobatchRun
from autopar.runtime.simulator.stages import SimulatedStage, train_step_in_stages
from tests.codegen.meshes import mesh
from tests.codegen.random_plans import random_plan
from tests.layouts import laid_out, program_of, simulated
from tests.plans.test_scheduling import check
from tests.zoo.cases import trained
from tests.zoo.staging import check_stages

MESHES = [(2,), (), (2, 2)]


def starts(name: str, microbatches: int, count: int) -> list[int]:
    """Where so many stages of about equally many segments begin."""
    parts = segments(in_microbatches(trained(name).traced.graph, microbatches))
    return [parts[k * len(parts) // count].start for k in range(1, count)]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("gpt2", 1),
        pytest.param("gpt2", 4, marks=pytest.mark.nightly),
        ("resnet", 1),
        ("mixtral", 1),
        *(pytest.param(n, 4, marks=pytest.mark.nightly) for n in ("llama", "t5", "gemma")),
    ],
)
def test_zero_bubble_is_eager(name: str, microbatches: int, count: int, schedule: str) -> None:
    check_stages(
        trained(name), starts(name, microbatches, count), microbatches, schedule, 3, MESHES
    )


def planned(
    name: str, microbatches: int, count: int, *shape: int, seed: int = 1
) -> list[tuple[Graph, Plan]]:
    """The graphs of stages, each with a random plan whose backward comes in two parts."""
    whole = in_microbatches(trained(name).traced.graph, microbatches)
    graphs = in_stages(whole, starts(name, microbatches, count))
    return [
        (
            graph,
            random_plan(graph, mesh(*shape), seed + k, microbatches=microbatches, is_split=True),
        )
        for k, graph in enumerate(graphs)
    ]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
def test_nothing_is_under_way_between_the_parts(name: str, seed: int) -> None:
    for graph, plan in planned(name, 1, 3, 2, 2, seed=10 * seed):
        layout = laid_out(graph, plan.structure.only)
        found = schedule(layout)
        check(layout.graph, found)
        first, second = found.backward, found.weights
        messages = Counter(type(e) for e in first if isinstance(e, (Start, Wait)))
        assert messages[Start] == messages[Wait]
        begun = {e.message for e in first if isinstance(e, Start)}
        assert not any(isinstance(e, Take) and e.message in begun for e in second)
        border = layout.graph.second_part
        assert border is not None
        moved = {n for e in first if isinstance(e, Compute) for n in [e.node] if n >= border}
        assert not moved and any(isinstance(e, Compute) for e in second)
        _check_reductions(layout, found)


def _check_reductions(layout: Layout, found: Schedule) -> None:
    """Gradients that leave are reduced in the second part, wherever they are made."""
    leaving = {
        value.ref
        for value in found.outputs
        if layout.graph.nodes[value.ref.node].phase is Phase.BACKWARD
    }
    read = {ref for node in layout.graph.nodes for ref in node.inputs if node.role is not Role.GRAD}
    for event in found.backward:
        if isinstance(event, Start):
            sources = {transfer.source.ref for transfer in event.message.transfers}
            assert not sources & (leaving - read)


@pytest.mark.parametrize(("name", "microbatches"), [("gpt2", 1), ("gpt2", 2), ("llama", 4)])
def test_what_waits_for_each_part_is_what_is_priced(
    name: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that a turn holds behind its forward, and behind the first part of its backward."""
    stages: list[SimulatedStage] = []
    expected: list[list[tuple[int, int]]] = []
    traced = trained(name).traced
    for graph, plan in planned(name, microbatches, 2):
        stages.append(simulated(traced, plan.structure.only, graph))
        layout = laid_out(graph, plan.structure.only)
        found = schedule(layout)
        expected.append(
            [
                (_bytes(layout, microbatch.saved), _bytes(layout, microbatch.carried))
                for microbatch in (found.before or found, found)
            ]
        )
    seen: dict[tuple[int, int, str], int] = {}
    numbers: list[MicrobatchRun] = []

    def watched(phase: str) -> None:
        original = getattr(MicrobatchRun, phase)

        def run(self: MicrobatchRun, microbatch: int, *given: Any) -> Any:
            if self not in numbers:
                numbers.append(self)
            made = original(self, microbatch, *given)
            seen[numbers.index(self), microbatch, phase] = _held(self, microbatch)
            return made

        monkeypatch.setattr(MicrobatchRun, phase, run)

    for phase in ("forward", "backward", "weights"):
        watched(phase)
    table = make_schedule("zb-h1", 2, microbatches)
    train_step_in_stages(stages, table, traced.graph, trained(name).tensors)
    for stage, both in enumerate(expected):
        for microbatch in range(microbatches):
            saved, carried = both[microbatch == microbatches - 1]
            assert seen[stage, microbatch, "forward"] == saved > 0
            assert seen[stage, microbatch, "backward"] == carried > 0
            assert seen[stage, microbatch, "weights"] == 0
    assert expected[1][1][1] != expected[1][1][0], "some of it is read by one part alone"


def _bytes(layout: Layout, values: tuple[Value, ...]) -> int:
    return sum(layout.held_bytes(value.ref, value.state) for value in values)


def _held(run: MicrobatchRun, microbatch: int) -> int:
    pieces = [piece for pieces in run.saved.get(microbatch, {}).values() for piece in pieces]
    return sum(piece.numel() * piece.element_size() for piece in pieces)


def test_the_first_part_makes_no_gradient() -> None:
    """The graphs are those of the parts: one sends, the other has the gradients."""
    traced = trained("gpt2").traced
    for k, (graph, plan) in enumerate(planned("gpt2", 2, 2)):
        program = program_of(traced, plan.structure.only, graph)
        sends = [n for n in graph.nodes if n.op == SEND and n.phase is Phase.BACKWARD]
        assert len(sends) == k
        for part in program.parts:
            names = {name.partition(":")[0] for name in part.backward_outputs}
            assert names == ({"sent", "saved"} if k else {"saved"})
            assert {name.partition(":")[0] for name in part.weights_outputs} == (
                {"grad"} if part is program else {"sum"}
            )
        assert program.gradients == program.weights_outputs
        params = {n.target for n in graph.with_role(Role.GRAD)}
        assert {name.partition(":")[2] for name in program.gradients} == params
        found = program.weights
        assert found is not None
        assert not k or any("mm" in str(node.target) for node in found.graph.nodes)


def test_a_plan_whose_backward_is_whole_is_as_it_was() -> None:
    graph, plan = planned("gpt2", 2, 2)[1]
    whole = random_plan(graph, mesh(), 2, microbatches=2)
    found = schedule(laid_out(graph, whole.structure.only))
    assert not found.weights and not found.carried
    assert not whole.structure.only.is_split and plan.structure.only.is_split
    split = schedule(laid_out(graph, plan.structure.only))
    layout = laid_out(graph, whole.structure.only)
    assert {layout.graph.nodes[e.node].name for e in found.backward if isinstance(e, Compute)} == {
        laid_out(graph, plan.structure.only).graph.nodes[e.node].name
        for e in (*split.backward, *split.weights)
        if isinstance(e, Compute)
    }
