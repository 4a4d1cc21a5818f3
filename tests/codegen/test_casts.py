"""Mixed precision: parameters that are cast travel as parameters do, in their other dtype, and so
do their gradients."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.ir.casts import casts_of
from autopar.ir.graph import Graph, Phase, Ref, Role
from autopar.ir.schedule import Compute, Event, Message, Schedule, Start, Wait
from autopar.plans.decisions import make_stage
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.plans.scheduling.events import schedule
from autopar.runtime.simulator.spmd import train_step
from autopar.solver import evaluate, solve
from tests.codegen.random_plans import as_plan, random_plan
from tests.codegen.test_random_plans import difference
from tests.layouts import laid_out, program_of
from tests.planned import on_h100
from tests.plans.test_scheduling import check
from tests.zoo.cases import ZooCase, make_case

WIDTH, LAYERS = 16, 4
SMALL, LARGE = 1, 1 << 20
"""Bytes of a bucket."""

TOLERANCE = 1e-5
"""Sums of float32 in another order."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.other = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """One weight is cast as it is, the other as a view."""
        return torch.tanh(x @ self.weight.float()) @ self.other.t().float()


class Mixed(nn.Module):
    """Stores float64 and computes in float32. The first weight is the last one, too, so that its
    gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x @ self.tied.float()
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (x @ self.tied.float()).square().mean()}


@cache
def made() -> ZooCase:
    torch.manual_seed(0)
    return make_case(Mixed(), {"x": torch.randn(64, WIDTH)}, exact=False)


def test_copies_of_parameters_and_what_becomes_gradients_are_known() -> None:
    graph = made().traced.graph
    casts = casts_of(graph)
    params = sorted(graph.nodes[param].target for param in casts.copies.values())
    names = [f"layers.{k}.{name}" for k in range(LAYERS) for name in ("other", "weight")]
    assert params == [*names, "tied", "tied"]
    assert all(graph.nodes[index].outputs[0].dtype == "float32" for index in casts.copies)
    grads = {n.inputs[0].node: n.target for n in graph.with_role(Role.GRAD)}
    read = {
        graph.nodes[n].inputs[0].node if graph.nodes[n].view else n: t for n, t in grads.items()
    }
    assert sorted(read[index] for index in casts.gradients) == names


def planned(strategy: str, sizes: str, bucket_bytes: int) -> Plan:
    """The best plan, whose bill is what was solved."""
    cluster, laid = on_h100(sizes, bucket_bytes)
    options = make_options(mesh=sizes, constraints={"strategy": strategy})
    request = make_graph_request(made().traced.graph, cluster, options).on(laid).within(1 << 40)
    problem = price(request)
    solution = solve(problem)
    structure = make_stage(request, problem, solution)
    estimates = cost_breakdown(request, structure).estimates
    hidden = sum(estimates.hidden.values())
    assert (
        evaluate(problem, solution.choice).objective
        == estimates.added_up_ns + estimates.host_ns - hidden
    )
    return as_plan(structure)


def scheduled(bucket_bytes: int) -> Schedule:
    """Under fsdp, with buckets of at most so many bytes."""
    return schedule(
        laid_out(made().traced.graph, planned("fsdp", "4", bucket_bytes).structure.only)
    )


def module(graph: Graph, event: Event) -> str:
    """Where the op of an event stands that is no cast; empty for other events."""
    casts = casts_of(graph)
    if not isinstance(event, Compute) or event.node in {*casts.copies, *casts.gradients}:
        return ""
    return graph.nodes[event.node].module


def about(graph: Graph, message: Message) -> set[str]:
    """The modules of what a message brings."""
    return {graph.nodes[transfer.source.ref.node].module for transfer in message.transfers}


def test_what_is_cast_is_gathered_a_block_ahead_and_gradients_are_awaited_a_block_later() -> None:
    graph = made().traced.graph
    found = scheduled(SMALL)
    check(graph, found)
    for events, order in ((found.forward, range(LAYERS)), (found.backward, range(LAYERS)[::-1])):
        names = [f"layers.{k}" for k in order]
        ops = {
            name: [k for k, e in enumerate(events) if module(graph, e) == name] for name in names
        }
        for before, name in pairwise(names):
            gathers = [
                k
                for k, event in enumerate(events)
                if isinstance(event, Start)
                and event.message.kind == "all_gather"
                and about(graph, event.message) == {name}
            ]
            assert len(gathers) == 2
            assert min(gathers) < max(ops[before]) and max(gathers) < min(ops[name])
            sums = [
                k
                for k, event in enumerate(events)
                if isinstance(event, Wait)
                and event.message.kind == "reduce_scatter"
                and about(graph, event.message) == {before}
            ]
            assert len(sums) == (2 if events is found.backward else 0)
            assert all(max(ops[name]) < k for k in sums)


def test_small_copies_are_gathered_together_and_their_gradients_leave_together() -> None:
    graph = made().traced.graph
    found = scheduled(LARGE)
    starts = [event.message for event in found.events if isinstance(event, Start)]
    sizes = {
        kind: [len(m.transfers) for m in starts if m.kind == kind and "layers.0" in about(graph, m)]
        for kind in ("all_gather", "reduce_scatter")
    }
    weights = 2 * LAYERS
    # Of the weight that is used twice there are two copies; backward reads one of them.
    assert sizes == {"all_gather": [weights + 2, weights + 1], "reduce_scatter": [weights]}


def test_under_fsdp_backward_is_handed_shards() -> None:
    graph = made().traced.graph
    layout = laid_out(graph, planned("fsdp", "4", LARGE).structure.only)
    copies = [n for n in casts_of(graph).copies if graph.nodes[n].phase is Phase.FORWARD]
    assert copies
    assert all(layout.for_backward(Ref(n))[0].kind == "S" for n in copies)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("bucket_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("sizes", ["4", "2x2"])
@pytest.mark.parametrize("how", ["fsdp", "", "random 0", "random 1", "random 2"])
def test_equal_to_eager(how: str, sizes: str, bucket_bytes: int) -> None:
    found, (_, on) = made(), on_h100(sizes, bucket_bytes)
    graph = found.traced.graph
    kind, _, seed = how.partition(" ")
    drawn = random_plan(graph, on, int(seed)) if seed else None
    plan = drawn or planned(kind, sizes, bucket_bytes)
    check(graph, schedule(laid_out(graph, plan.structure.only)))
    program = program_of(found.traced, plan.structure.only, graph)
    step = train_step(program, on, graph, plan.structure.only, found.tensors, tolerance=TOLERANCE)
    worst = {"loss": difference(step.outputs["loss:0"], found.outputs["loss:0"])}
    for name, expected in found.gradients.items():
        worst[name] = difference(step.gradients[name], expected)
    assert len(worst) == 2 + 2 * LAYERS
    assert not {name: far for name, far in worst.items() if not far <= TOLERANCE}
