"""Margins against enumerations of plans; roles, and how they compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from autopar.cluster import parse_cluster
from autopar.cost_model.price import price
from autopar.graph import Graph
from autopar.margin import search_with_margin
from autopar.meshes import parse_mesh
from autopar.options import Options
from autopar.plan import Margin, Plan
from autopar.problem import Problem
from autopar.roles import ENOUGH, Roles, find_roles
from autopar.solver import solve
from autopar.solver.evaluate import Evaluator
from tests.graphs import linear_step

ROOMY = 1 << 40


def quiet(_: str) -> None:
    pass


def stated(graph: Graph, cluster: str, mesh: str, limit: int = ROOMY) -> Problem:
    described = parse_cluster(cluster)
    laid = parse_mesh(mesh, described)
    return price(graph, described, laid, Options(mesh=mesh), usage_limit=limit)


def moved(roles: Roles, one: Sequence[object], other: Sequence[object]) -> float:
    """The share of the parameter bytes that have other roles."""
    each = zip(roles.classes, one, other, strict=True)
    return sum(weights.num_bytes for weights, a, b in each if a != b) / roles.total_bytes


def with_margin(graph: Graph, cluster: str, mesh: str, limit: int = ROOMY) -> Plan:
    options = Options(mesh=mesh, memory_limit_bytes=limit)
    return search_with_margin(
        graph, parse_cluster(cluster), options, fingerprint="f", torch_version="", progress=quiet
    )


def margin(graph: Graph, cluster: str, mesh: str, limit: int = ROOMY) -> Margin:
    found = with_margin(graph, cluster, mesh, limit).provenance.margin
    assert found is not None
    return found


@pytest.mark.parametrize("cluster", ["2x2xH100", "2x2xL4"])
@pytest.mark.parametrize("batch", [16, 4096])
def test_no_plan_of_all_is_another_and_better(cluster: str, batch: int) -> None:
    graph = linear_step(batch, 256, 512)
    problem = stated(graph, cluster, "2x2")
    roles, evaluator = find_roles(graph, problem), Evaluator(problem)
    chosen = roles.of(problem, solve(problem).choice)
    best = min(
        found.objective
        for choice in product(*(range(len(costs)) for costs in problem.costs))
        if roles.of(problem, choice) != chosen and (found := evaluator(choice)).feasible
    )
    found = margin(graph, cluster, "2x2")
    assert (found.bound_ns, found.step_ns) == (best, best)


@pytest.mark.parametrize(
    ("hidden", "out", "layers"), [(256, 256, 2), (256, 1024, 2), (1024, 256, 3), (128, 2048, 3)]
)
def test_no_combination_of_roles_is_another_and_better(hidden: int, out: int, layers: int) -> None:
    graph = linear_step(512, hidden, out, layers)
    problem = stated(graph, "4xL4", "4")
    roles = find_roles(graph, problem)
    chosen = roles.of(problem, solve(problem).choice)
    steps: list[int] = []
    for other in product([("replicated",), ("gathered",), ("by columns",), ("by rows",)],
                         repeat=layers):  # fmt: skip
        if moved(roles, chosen, other) >= ENOUGH:
            steps.append(solve(only(problem, roles, other)).objective)
    found = margin(graph, "4xL4", "4")
    assert (found.bound_ns, found.step_ns) == (min(steps), min(steps))


def only(problem: Problem, roles: Roles, wanted: Sequence[tuple[str]]) -> Problem:
    """`problem` on one axis, where the classes have the roles `wanted`."""
    costs = list(problem.costs)
    for weights, (role,) in zip(roles.classes, wanted, strict=True):
        param, op = problem.keys.index(weights.key), problem.keys.index(weights.op)
        stored = {"replicated": "[R]|", "gathered": "["}.get(role, "")
        for number, label in enumerate(problem.labels[param]):
            if not label.startswith(stored) or (role == "gathered" and label.startswith("[R]")):
                costs[param] = costs[param].copy()
                costs[param][number] = 1 << 61
        for number, label in enumerate(problem.labels[op]):
            taken = {"n": "by columns", "k": "by rows"}.get(label, "")
            if taken != (role if role.startswith("by") else ""):
                costs[op] = costs[op].copy()
                costs[op][number] = 1 << 61
    return replace(problem, costs=tuple(costs))
