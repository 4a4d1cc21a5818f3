"""Margins against enumerations of plans; roles, and how they compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import msgspec
import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.compile import best_on
from autopar.cost_model.price import price
from autopar.driver.planning import answer
from autopar.driver.search.meshes import estimates_of
from autopar.driver.search.weight_layouts import ENOUGH, Roles, describe, find_roles, signature
from autopar.ir.graph import Graph
from autopar.ir.problem import Problem, Solution, Status
from autopar.plans.plan import Plan
from autopar.plans.provenance import Margin
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions, SearchOptions
from autopar.plans.requests.policy import other_thresholds
from autopar.plans.requests.request import make_graph_request
from autopar.solver import solve
from autopar.solver.evaluate import Evaluator
from autopar.solver.exact import WINDOWED_TOLERANCE
from tests.graphs import linear_step
from tests.planned import hostless
from tests.report.plans import two_axis_plan

ROOMY = 1 << 40


def quiet(_: str) -> None:
    pass


def stated(graph: Graph, cluster: str, mesh: str, limit: int = ROOMY) -> Problem:
    described = hostless(cluster)
    laid = parse_mesh(mesh, described)
    options = Options(mesh=mesh, memory_limit_bytes=limit)
    return price(make_graph_request(graph, described, options).on(laid))


def moved(roles: Roles, one: Sequence[object], other: Sequence[object]) -> float:
    """The share of the parameter bytes that have other roles."""
    each = zip(roles.classes, one, other, strict=True)
    return sum(weights.num_bytes for weights, a, b in each if a != b) / roles.total_bytes


def with_margin(graph: Graph, cluster: str, mesh: str, limit: int = ROOMY) -> Plan:
    given = PlanOptions(search=SearchOptions(margin=True))
    options = Options(given, mesh=mesh, memory_limit_bytes=limit)
    asked = make_graph_request(graph, hostless(cluster), options)
    return answer(asked, quiet)


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


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("hidden", "out", "layers"), [(256, 256, 2), (256, 1024, 2), (1024, 256, 3), (128, 2048, 3)]
)
def test_no_combination_of_roles_is_another_and_better(hidden: int, out: int, layers: int) -> None:
    graph = linear_step(512, hidden, out, layers)
    problem = stated(graph, "4xL4", "4")
    roles = find_roles(graph, problem)
    chosen = roles.of(problem, solve(problem).choice)
    kinds = [("replicated",), ("gathered",), ("by columns",), ("by rows",)]
    steps = [
        solve(only(problem, roles, other)).objective
        for other in product(kinds, repeat=layers)
        if moved(roles, chosen, other) >= ENOUGH
    ]
    found = margin(graph, "4xL4", "4")
    assert found.step_ns == min(steps)
    assert (1 - WINDOWED_TOLERANCE) * min(steps) <= found.bound_ns <= min(steps)


def only(problem: Problem, roles: Roles, wanted: Sequence[tuple[str]]) -> Problem:
    """`problem` on one axis, where the classes have the roles `wanted`."""
    costs = list(problem.costs)
    for weights, (role,) in zip(roles.classes, wanted, strict=True):
        param, op = problem.keys.index(weights.key), problem.keys.index(weights.op)
        stored = {"replicated": "[R]|", "gathered": "["}.get(role, "")
        for number, label in enumerate(map(str, problem.labels[param])):
            if not label.startswith(stored) or (role == "gathered" and label.startswith("[R]")):
                costs[param] = costs[param].copy()
                costs[param][number] = 1 << 61
        for number, label in enumerate(map(str, problem.labels[op])):
            taken = {"n": "by columns", "k": "by rows"}.get(label, "")
            if taken != (role if role.startswith("by") else ""):
                costs[op] = costs[op].copy()
                costs[op][number] = 1 << 61
    return replace(problem, costs=tuple(costs))


def test_the_plan_is_the_one_that_is_found_without_a_margin() -> None:
    graph, options = linear_step(512, 256, 1024, 2), Options()
    cluster = hostless("2x4xL4")
    alone = answer(make_graph_request(graph, cluster, options), quiet)
    found = with_margin(graph, "2x4xL4", "auto", limit=cluster.device.memory_bytes)
    assert found.structure == alone.structure
    assert found.provenance.margin is not None and alone.provenance.margin is None
    assert alone.provenance.is_fragile is None


@pytest.mark.breadth(2)
@pytest.mark.parametrize("batch", [16, 512, 65536])
def test_no_plan_of_any_mesh_is_another_and_better(batch: int) -> None:
    graph = linear_step(batch, 256, 512)
    plan = with_margin(graph, "4xL4", "auto")
    found: dict[object, int] = {}
    for mesh, sizes in (("4", (4,)), ("2x2", (2, 2))):
        problem = stated(graph, "4xL4", mesh)
        roles, evaluator = find_roles(graph, problem), Evaluator(problem)
        for choice in product(*(range(len(costs)) for costs in problem.costs)):
            lie = tuple(signature(each, sizes) for each in roles.of(problem, choice))
            cost = evaluator(choice)
            if cost.feasible:
                found[lie] = min(cost.objective, found.get(lie, cost.objective))
    first, second = sorted(found.values())[:2]
    margin = plan.provenance.margin
    assert plan.provenance.objective_ns == first
    assert margin is not None and margin.step_ns is not None
    assert margin.bound_ns <= second <= margin.step_ns


@pytest.mark.parametrize("batch", [64, 512])
def test_where_memory_binds_the_rival_fits(batch: int) -> None:
    graph, cluster = linear_step(batch, 256, 512), hostless("2x2xH100")
    limit = with_margin(graph, "2x2xH100", "2x2").estimates.memory.total * 9 // 10
    options = Options(mesh="2x2", memory_limit_bytes=limit)
    mesh = parse_mesh("2x2", cluster)
    best = best_on(make_graph_request(graph, cluster, options).on(mesh), quiet)
    problem = replace(best.problem, usage_limit=limit)
    roles, evaluator = find_roles(graph, problem), Evaluator(problem)
    chosen = roles.of(problem, best.solution.choice)
    costs = sorted(
        (cost.objective, choice, cost.arcs)
        for choice in product(*(range(len(costs)) for costs in problem.costs))
        if roles.of(problem, choice) != chosen and (cost := evaluator(choice)).feasible
    )
    fitting = next(
        objective
        for objective, choice, arcs in costs
        if estimates_of(best, Solution(Status.FEASIBLE, choice, arcs)).memory.total <= limit
    )
    found = margin(graph, "2x2xH100", "2x2", limit)
    assert found.bound_ns == costs[0][0] <= fitting
    assert found.step_ns is None or found.step_ns >= fitting


@pytest.mark.breadth(2)
@pytest.mark.parametrize("steps", [1, 20, 60, 100])
def test_limited_work_leaves_what_is_proven(steps: int) -> None:
    graph = linear_step(4096, 256, 1024, 3)
    exact = margin(graph, "2x4xL4", "2x4")
    with other_thresholds(rival_iterations=steps):
        plan = with_margin(graph, "2x4xL4", "2x4")
    found = plan.provenance.margin
    assert found is not None
    assert found.bound_ns <= exact.bound_ns
    assert found.step_ns is None or found.step_ns >= exact.bound_ns
    assert steps > 1 or found.step_ns is None


def test_one_device_has_no_rival() -> None:
    assert with_margin(linear_step(16, 64, 64), "1xH100", "1").provenance.margin is None


@pytest.mark.parametrize(
    ("roles", "sizes", "text"),
    [
        (("gathered", "gathered"), (8, 8), (("gathered", 64),)),
        (("gathered",), (64,), (("gathered", 64),)),
        (("gathered", "by rows"), (16, 4), (("gathered", 16), ("by rows", 4))),
        (("gathered", "by rows", "by rows"), (16, 2, 2), (("gathered", 16), ("by rows", 4))),
        (("gathered", "by rows"), (1, 4), (("by rows", 4),)),
    ],
)
def test_roles_compare_between_meshes(
    roles: tuple[str, ...], sizes: tuple[int, ...], text: object
) -> None:
    assert signature(roles, sizes) == text


def test_rivals_in_words() -> None:
    before = (("gathered", "by rows"), ("gathered", "by rows"), ("replicated", "by columns"))
    after = (("replicated", "by rows"), ("replicated", "by rows"), ("replicated", "by columns"))
    assert describe(["a", "b", "c"], before, after, ("dp", "tp")) == (
        "a, b: replicated on dp instead of gathered"
    )


@pytest.mark.parametrize(
    ("margin_of_1000", "is_fragile"),
    [
        (None, None),
        (Margin(1004, 1004, ""), True),
        (Margin(1000, 1004, ""), True),
        (Margin(1000, 1010, ""), None),
        (Margin(1000, None, ""), None),
        (Margin(1005, 1005, ""), False),
        (Margin(1005, None, ""), False),
    ],
)
def test_fragile(margin_of_1000: Margin | None, is_fragile: bool | None) -> None:
    provenance = msgspec.structs.replace(
        two_axis_plan().provenance, objective_ns=1000, margin=margin_of_1000
    )
    assert provenance.is_fragile is is_fragile
