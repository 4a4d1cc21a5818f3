"""The plan that is chosen for devices on which it pays to divide all work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.price import price
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster, Kernels, Level, Link, Mesh
from autopar.ir.problem import Problem, Solution, Status
from autopar.plans.decisions import make_stage
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.solver import solve
from autopar.solver.clock import Clock
from autopar.solver.evaluate import Evaluator
from autopar.solver.heuristic import Descent
from tests.codegen.random_plans import as_plan

LIMIT = 80 << 30
STARTLESS = Kernels(start_s=0.0, matmul_start_s=0.0, wave=0.0, depth=0.0)


def slow(sizes: Sequence[int]) -> tuple[Cluster, Mesh]:
    """Devices without the starts and launches that make a tiny model cheapest where it is
    replicated."""
    found = parse_cluster(f"{prod(sizes)}xH100")
    rates = (("float32", 1e9), ("float64", 1e9))
    device = replace(
        found.device,
        flops_per_s=rates,
        memory_bytes_per_s=1e10,
        launch_s=0.0,
        kernels=STARTLESS,
    )
    link = Link("fast", 1e10, 1e-9, 0.0, "made up")
    cluster = replace(found, device=device, levels=(Level(prod(sizes), link),))
    return cluster, parse_mesh("x".join(map(str, sizes)), cluster)


def chosen_plan(graph: Graph, sizes: Sequence[int]) -> tuple[Plan, Mesh]:
    """The cheapest plan on one axis. On more it is what the solver starts from, without the proof:
    within a few per cent of the cheapest, in a hundredth of the time."""
    cluster, on = slow(sizes)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(on)
    problem = price(request)
    solution = solve(problem) if len(sizes) == 1 else _descended(problem)
    return as_plan(make_stage(request, problem, solution)), on


def _descended(problem: Problem) -> Solution:
    descent = Descent(problem, Evaluator(problem), Clock(None))
    starts = (descent.grown(), descent.smallest_memory())
    found = [plan for start in starts if (plan := descent.improve(start)) is not None]
    choice, evaluation = min(found, key=lambda plan: plan[1].objective)
    return Solution(
        Status.FEASIBLE, choice, evaluation.arcs, evaluation.objective, solver="descent"
    )  # fmt: skip
