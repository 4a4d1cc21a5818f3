"""Parameters that live on the host, whichever they are and however they are laid out, beside what
is recomputed and offloaded, change no gradient; and the device has what it needs when it does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, fx, nn

from autopar.codegen import bind
from autopar.ir.graph import Graph, Role
from autopar.ir.mesh import Mesh
from autopar.ir.offloading import Hosting, can_be_on_host, offloadable
from autopar.ir.passes.recompute import with_recompute
from autopar.plans.plan import Plan
from autopar.plans.scheduling.events import schedule
from autopar.runtime.ops.host_copies import ARRIVED, LANDED, OFFLOAD, RELOAD
from autopar.tracer import trace
from autopar.tracer.torch_private import FakeTensorMode
from tests.codegen.models import case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_offload import in_blocks, ran, stack
from tests.codegen.test_random_plans import TOLERANCE, difference
from tests.codegen.test_recompute import candidates
from tests.layouts import laid_out, program_of
from tests.live_bytes import DTYPES
from tests.redone import redecided


def hosted_at_random(graph: Graph, part: float, seed: int) -> list[str]:
    draw, known = random.Random(seed), can_be_on_host(graph)
    return [name for members in known.values() for name in members if draw.random() < part]


def planned(graph: Graph, on: Mesh, seed: int, part: float, microbatches: int) -> Plan:
    draw = random.Random(seed)
    again = [key for key in candidates(graph) if microbatches == 1 and draw.random() < 0.3]
    step = with_recompute(graph, again)
    away = [key for key in offloadable(step, on) if microbatches == 1 and draw.random() < 0.3]
    hosted = hosted_at_random(graph, part, seed)
    plan = random_plan(step, on, seed, microbatches=microbatches, hosted=hosted)
    structure = redecided(
        plan.structure, recompute=tuple(again), offloaded=tuple(away), reload_pace=1 << 16
    )
    return msgspec.structs.replace(plan, structure=structure)


@pytest.mark.breadth(5)
@pytest.mark.parametrize(("seed", "part", "microbatches"), [(0, 0.4, 1), (1, 1.0, 1), (2, 0.7, 2)])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_equal_to_eager(
    name: str, sizes: Sequence[int], seed: int, part: float, microbatches: int
) -> None:
    found, on = case(name), in_blocks(*sizes)
    plan = planned(found.traced.graph, on, seed, part, microbatches)
    assert any(param.residency == "cpu" for param in plan.structure.params.values())
    step = ran(found, plan, TOLERANCE[name])
    assert step.gradients.keys() == found.gradients.keys()
    for parameter, expected in found.gradients.items():
        assert difference(step.gradients[parameter], expected) <= TOLERANCE[name], parameter


@pytest.mark.breadth(2)
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
def test_equal_to_the_same_plan_on_the_device(sizes: Sequence[int]) -> None:
    """To the last bit, the masks of dropout and what batch norm counts among it."""
    found, on = stack(), in_blocks(*sizes)
    graph = found.traced.graph
    names = [member for members in can_be_on_host(graph).values() for member in members]
    there = random_plan(graph, on, 3, hosted=names)
    params = {
        name: msgspec.structs.replace(param, residency="cuda")
        for name, param in there.structure.params.items()
    }
    structure = redecided(there.structure, params=params)
    here = msgspec.structs.replace(there, structure=structure)
    plain, hosted = (ran(found, plan, 0.0) for plan in (here, there))
    for expected, got in ((plain.outputs, hosted.outputs), (plain.gradients, hosted.gradients)):
        assert expected.keys() == got.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_is_copied_for_each_phase_but_near_the_turn(name: str) -> None:
    graph, on = case(name).traced.graph, in_blocks(2)
    names = [member for members in can_be_on_host(graph).values() for member in members]
    plan = random_plan(graph, on, 0, hosted=names)
    layout = laid_out(graph, plan.structure.only)
    events = schedule(layout)
    reloaded = {each.param for each in layout.streamed_params if each.backward is not None}
    assert 0 < len(reloaded) < len(names)
    assert {value.ref for value in events.saved if value.on_host} == reloaded
    gradients = {value for value in events.outputs if value.on_host}
    assert len(gradients) == len(names)


def targets(gm: fx.GraphModule | None) -> list[Any]:
    assert gm is not None
    return [node.target for node in gm.graph.nodes]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("part", [0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_op_finds_its_inputs_on_the_device(name: str, part: float) -> None:
    """Run with fake tensors on a GPU: an op that reads a tensor of the host fails."""
    found, on = case(name), in_blocks()
    graph = found.traced.graph
    hosted = hosted_at_random(graph, part, 0)
    plan = random_plan(graph, on, 0, hosted=hosted)
    cuda = torch.device("cuda:0")
    with FakeTensorMode():
        program = bind(
            program_of(found.traced, plan.structure.only, graph),
            NAMES,
            on,
            (0,),
            cuda,
        )
        assert targets(program.forward).count(RELOAD) == len(hosted)
        assert targets(program.backward).count(OFFLOAD) == len(hosted)
        tensors: dict[str, Tensor] = {
            f"{node.role.value}:{node.target}": torch.empty(
                node.outputs[0].shape,
                dtype=DTYPES[node.outputs[0].dtype],
                device="cpu" if node.target in hosted else cuda,
            )
            for node in graph.with_role(*INPUTS)
        }
        results = program.forward([tensors[each] for each in program.forward_inputs])
        tensors |= dict(zip(program.forward_outputs, results, strict=True))
        assert program.backward is not None
        gradients = program.backward([tensors[each] for each in program.backward_inputs])
    names = [each.removeprefix("grad:") for each in program.backward_outputs]
    assert {n for n, g in zip(names, gradients, strict=True) if g.device.type == "cpu"} == {*hosted}


class FusedLoss(torch.autograd.Function):
    """Makes its gradient in forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.sum(0) * 2.0)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.saved_tensors[0]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", FusedLoss.apply(x, self.weight))


def test_the_host_waits_for_gradients_that_forward_made() -> None:
    found, on = trace(Fused(), (torch.randn(8, 4),), {}), in_blocks()
    plan = random_plan(found.graph, on, 0, hosted=["weight"])
    program = program_of(found, plan.structure.only)
    assert LANDED in targets(program.backward) and ARRIVED not in targets(program.backward)


NAMES = {"ax0": "ax0"}
INPUTS = (Role.PARAM, Role.BUFFER, Role.INPUT, Role.TANGENT)


def test_parts_of_a_class_are_spread() -> None:
    hosting = Hosting.of("abcdefgh", {})
    assert "".join(hosting.names(3)) == "cfh"
    assert all(len(hosting.names(count)) == count for count in range(9))
