"""The problem that is stated, the bill that is added up, and that the two agree."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.driver.planning import answer
from autopar.errors import InfeasibleError, PlanMismatchError
from autopar.ir.buckets import Sharing
from autopar.ir.graph import Phase, Role
from autopar.ir.problem import Problem
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding
from autopar.ir.uses import groups
from autopar.plans.decisions import make_stage
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import make_graph_request
from autopar.solver import solve
from autopar.solver.evaluate import peak_usage
from tests.graphs import linear_step
from tests.layouts import laid_out

LIMIT = 80 << 30


def quiet(_: str) -> None:
    pass


def random_solution(problem: Problem, seed: int):
    """A feasible solution of a problem whose costs were replaced by random ones."""
    rng = np.random.default_rng(seed)
    shuffled = replace(
        problem,
        costs=tuple(rng.integers(0, 10**6, len(c)) for c in problem.costs),
        usage_limit=None,
    )
    return solve(shuffled)


ANY_PLAN = given(seed=st.integers(0, 50), mesh=st.sampled_from(["2", "4", "2x2", "2x4"]))
"""Not the optimum alone: the solver's favourites exercise a small part of the prices."""


@settings(max_examples=25)
@ANY_PLAN
def test_the_bill_of_any_plan_is_what_the_problem_says(seed: int, mesh: str) -> None:
    check_bill(seed, mesh)


@pytest.mark.nightly
@ANY_PLAN
def test_the_bill_of_no_plan_is_other_than_the_problem_says(seed: int, mesh: str) -> None:
    check_bill(seed, mesh)


def check_bill(seed: int, mesh: str) -> None:
    graph = linear_step(64, 32, 16, layers=3)
    cluster = parse_cluster(f"{mesh}xH100")
    layout = parse_mesh(mesh, cluster)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(layout)
    problem = price(request)
    solution = random_solution(problem, seed)
    structure = make_stage(request, problem, solution)
    costs = sum(int(c[i]) for c, i in zip(problem.costs, solution.choice, strict=True))
    moves = sum(
        int(flow.costs[list(used)].sum())
        for flow, used in zip(problem.flows, solution.arcs, strict=True)
        if used
    )
    bill = cost_breakdown(request, structure).estimates
    launched = sum(op.host_ns for op in bill.ops.values())
    assert bill.compute_ns + bill.optimizer_ns + launched == costs
    assert bill.communication_ns + bill.host_ns - launched == moves


@settings(max_examples=25)
@given(seed=st.integers(0, 50), mesh=st.sampled_from(["4", "2x4"]))
def test_what_a_problem_counts_is_held_when_the_forward_phase_ends(seed: int, mesh: str) -> None:
    graph = linear_step(64, 32, 16, layers=3)
    cluster = parse_cluster(f"{mesh}xH100")
    layout_mesh = parse_mesh(mesh, cluster)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(layout_mesh)
    problem = price(request)
    solution = random_solution(problem, seed)
    structure = make_stage(request, problem, solution)
    counted, _ = peak_usage(problem, solution.choice)
    layout = laid_out(graph, structure)
    held = 0
    for node in graph.with_role(Role.PARAM):
        param, tensor = structure.params[node.target], node.outputs[0]
        stored, kept = (
            local_bytes(tensor, graph.atoms, Sharding.parse(text), layout_mesh.sizes)
            for text in (param.storage, param.for_backward)
        )
        # Itself, its gradient and AdamW's two states.
        held += 4 * stored + (kept if param.for_backward != param.storage else 0)
    for group in groups(graph):
        is_op = graph.nodes[group.root.node].role is Role.OP
        if group.crosses and group.phase is Phase.FORWARD and is_op:
            tensor, state = graph.type_of(group.root), layout.for_backward(group.root)
            held += local_bytes(tensor, graph.atoms, state, layout_mesh.sizes)
    assert counted == held
    peak = cost_breakdown(request, structure).estimates.memory
    assert peak.total >= held


def test_a_small_model_on_a_slow_link_is_replicated() -> None:
    graph = linear_step(4096, 64, 64, layers=2)
    plan = answer(make_graph_request(graph, parse_cluster("2x1xL4"), Options()), quiet)
    assert {(p.storage, p.for_backward) for p in plan.structure.params.values()} == {("[R]", "[R]")}
    assert plan.provenance.status == "optimal"
    assert plan.provenance.objective_ns == plan.estimates.step_ns == plan.provenance.bound_ns


def test_a_tight_limit_shards_parameters_and_a_tighter_one_is_infeasible() -> None:
    graph = linear_step(2048, 1024, 1024, layers=4)
    cluster = parse_cluster("8xH100")
    request = make_graph_request(graph, cluster, Options(PlanOptions(optimizer="sgd"))).on(
        parse_mesh("8", cluster)
    )
    roomy = best_on(request, quiet)
    whole = roomy.estimates.memory
    limit = whole.total - (1 << 19)
    tight = best_on(request.within(limit), quiet)
    assert tight.estimates.memory.total <= limit < whole.total
    assert tight.solution.objective > roomy.solution.objective
    with pytest.raises(InfeasibleError, match=r"is missing.*w\d"):
        best_on(request.within(1 << 20), quiet)


def test_a_plan_that_misses_a_decision_or_a_route_is_refused() -> None:
    graph = linear_step(64, 32, 16, layers=2)
    cluster = parse_cluster("4xH100")
    mesh = parse_mesh("4", cluster)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(mesh)
    problem = price(request)
    structure = make_stage(request, problem, random_solution(problem, 1))
    without_op = replace_struct(structure, ops=dict(list(structure.ops.items())[1:]))
    with pytest.raises(PlanMismatchError, match="no decision for"):
        cost_breakdown(request, without_op)
    assert structure.routes
    without_route = replace_struct(structure, routes={})
    with pytest.raises(PlanMismatchError, match="never leads from"):
        cost_breakdown(request, without_route)


def replace_struct(structure, **changes):

    return msgspec.structs.replace(structure, **changes)


def test_one_way_for_all_parameters_costs_what_its_buckets_cost() -> None:
    sizes = [1 << 20] * 10
    shared = Sharing(sum(sizes), len(sizes))
    assert sum(shared.latency_share(size, 1 << 30) for size in sizes) == pytest.approx(1)
    many = Sharing(1 << 40, 1000)
    assert many.latency_share(1 << 20, 1 << 22) == pytest.approx(1 / 4)
    assert many.latency_share(1 << 23, 1 << 22) == 1
    assert many.latency_share(0, 1 << 22) == 1 / 1000
