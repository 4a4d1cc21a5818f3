"""Models of many layers that do not repeat: the work to plan grows with them, and no faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model import network, offloads
from autopar.cost_model.price import price
from autopar.ir.graph import Graph, Node
from autopar.ir.problem import Problem, Status
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.plans.scheduling.bucketing import work
from autopar.solver import driver, exact, solve
from autopar.solver.clock import Clock
from autopar.solver.column_generation import path
from autopar.solver.evaluate import peak_usage
from autopar.tracer import trace

LAYERS = 40


class Widening(nn.Module):
    """Linear layers, each wider than the one before."""

    def __init__(self, count: int) -> None:
        super().__init__()
        widths = range(64, 65 + count)
        layers = (nn.Linear(a, b) for a, b in pairwise(widths))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def stated(graph: Graph, mesh: str) -> Problem:
    cluster = parse_cluster("8xH100")
    options = Options(memory_limit_bytes=80 << 30)
    return price(make_graph_request(graph, cluster, options).on(parse_mesh(mesh, cluster)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Widening(LAYERS), (torch.randn(64, 64),)).graph


@pytest.fixture
def column_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems take the way of those with very many nodes, whatever they have."""
    monkeypatch.setattr(driver, "MAX_CHOICES", 0)
    monkeypatch.setattr(path, "_MANY_NODES", 0)


def test_steps_are_found_once_for_tensors_alike(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    make = network.Steps

    def counted(*args: object) -> network.Steps:
        found.append(1)
        return make(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(network, "Steps", counted)
    flows = len(stated(graph, "8").flows)
    assert flows > 9 * LAYERS
    assert len(found) < flows / 5


def test_what_blocks_compute_is_added_up_once(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = parse_cluster("8xH100")
    request = make_graph_request(graph, cluster, Options()).on(parse_mesh("8", cluster)).opened()
    monkeypatch.setattr(offloads, "is_open", lambda _: True)
    seen: list[int] = []

    def counted(graph: Graph, node: Node) -> float:
        seen.append(node.index)
        return work(graph, node)

    monkeypatch.setattr(offloads, "work", counted)
    found = offloads.Offloads(request)
    assert found.is_open
    assert LAYERS < len(seen) <= len(request.step.nodes)
    assert len(seen) == len({*seen})


def test_many_nodes_need_no_program(
    graph: Graph, column_generation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What message passing reads off is as good as the integer program's plan, to what is said."""
    problem = stated(graph, "2x4")
    whole = exact.find_exactly(problem, Clock(None), lambda _: None)
    monkeypatch.setattr(exact, "build_model", None)
    found = solve(problem)
    assert whole.proven and whole.evaluation is not None
    assert found.bound <= whole.evaluation.objective <= found.objective
    assert found.objective - found.bound <= path.TOLERANCE * found.objective


def test_little_memory(graph: Graph, column_generation: None) -> None:
    """Where a limit binds, what is read off does not fit, and prices of memory must be found."""
    problem = stated(graph, "8")
    rich = solve(problem)
    lean = sum(int(usage.amounts.min()) for (usage,) in problem.usages)
    taken, _ = peak_usage(problem, rich.choice)
    assert taken > lean
    tight = solve(replace(problem, usage_limit=(lean + taken) // 2))
    assert tight.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert tight.objective >= rich.bound
    assert tight.objective - tight.bound <= path.TOLERANCE * tight.objective
