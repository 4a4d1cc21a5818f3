"""The host that launches kernels and collectives: what it costs a step, and when nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster.kernels import LAUNCHES_PER_COLLECTIVE
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.ir.mesh import Cluster
from autopar.ir.problem import Problem, Solution
from autopar.plans.decisions import make_stage
from autopar.plans.estimates import StageEstimates
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.solver import evaluate, solve
from tests.cost_model.test_price import LIMIT, random_solution
from tests.cost_model.test_traffic import chain
from tests.graphs import linear_step
from tests.solver.bruteforce import solve_by_enumeration

H100 = parse_cluster("2x4xH100")
LAUNCH_NS = round(H100.device.launch_s * 1e9)


def behind(cluster: Cluster, launch_s: float) -> Cluster:
    """The cluster with other hosts."""
    return replace(cluster, device=replace(cluster.device, launch_s=launch_s))


def wanted(cluster: Cluster, width: int, backend: str = "", layers: int = 3) -> PlanRequest:
    graph = linear_step(8192, width, width, layers=layers)
    options = Options(PlanOptions(backend=backend), memory_limit_bytes=LIMIT)
    return make_graph_request(graph, cluster, options).on(parse_mesh("2x4", cluster))


@pytest.mark.parametrize("seed", range(3))
def test_a_slower_host_makes_no_step_shorter(seed: int) -> None:
    request = wanted(H100, 512)
    structure = make_stage(request, *_drawn(request, seed))
    steps: list[StageEstimates] = []
    for launch_s in (0.0, 1e-6, 8e-6, 50e-6, 200e-6):
        asked = replace(request, cluster=behind(H100, launch_s))
        steps.append(cost_breakdown(asked, structure).estimates)
    assert steps[0].exposed_host_ns == 0 < steps[-1].exposed_host_ns
    assert [each.step_ns for each in steps] == sorted(each.step_ns for each in steps)
    for each in steps:
        parts = each.compute_ns + each.exposed_communication_ns + each.exposed_host_ns
        assert each.step_ns == parts + each.optimizer_ns
    # At the end all but the device's last ops waits for the host.
    assert 0.9 * steps[-1].host_ns < steps[-1].step_ns


def _drawn(request: PlanRequest, seed: int) -> tuple[Problem, Solution]:
    problem = price(request)
    return problem, random_solution(problem, seed)


def test_a_step_of_long_kernels_does_not_wait_for_its_host() -> None:
    """Ops of milliseconds: the host, which takes 8 us for each, is ahead of the device."""
    request = wanted(H100, 16384)
    structure = make_stage(request, *_drawn(request, 0))
    alone = cost_breakdown(replace(request, cluster=behind(H100, 0.0)), structure).estimates
    found = cost_breakdown(request, structure).estimates
    assert (alone.host_ns, found.exposed_host_ns) == (0, 0)
    assert found.host_ns > 0
    assert found.step_ns == alone.step_ns
    assert found.modelled_ns == alone.modelled_ns


def test_short_kernels_run_at_the_pace_of_the_host() -> None:
    request = wanted(behind(H100, 100e-6), 256, "eager", layers=24)
    found = best_on(request, lambda _: None)
    estimates = found.estimates
    assert estimates.host_ns < estimates.modelled_ns < 1.05 * estimates.host_ns
    assert estimates.step_ns == pytest.approx(estimates.modelled_ns, rel=0.03)


def test_a_cpu_has_no_host_beside_it() -> None:
    cluster = parse_cluster("2x4xcpu")
    request = wanted(cluster, 512)
    problem = price(request)
    assert not any(saving.resource == "host" for w in problem.windows for saving in w.savings)
    structure = make_stage(request, problem, random_solution(problem, 0))
    estimates = cost_breakdown(request, structure).estimates
    assert (estimates.host_ns, estimates.exposed_host_ns) == (0, 0)
    assert not any(op.host_ns for op in estimates.ops.values())


def test_what_is_fused_is_launched_once() -> None:
    """exp(tanh(x)) before a product: inductor makes one kernel of two ops."""
    cluster = parse_cluster("1xH100")
    launches: dict[str, list[int]] = {}
    for backend in ("eager", "inductor"):
        options = Options(PlanOptions(backend=backend), memory_limit_bytes=LIMIT)
        request = make_graph_request(chain(), cluster, options).on(parse_mesh("1", cluster))
        found = best_on(request, lambda _: None).estimates
        launches[backend] = [op.host_ns // LAUNCH_NS for op in found.ops.values() if op.count]
        assert found.host_ns == LAUNCH_NS * sum(launches[backend])
    assert launches == {"eager": [1, 1, 1], "inductor": [0, 1, 1]}


def test_a_collective_takes_the_host_longer_than_a_kernel() -> None:
    request = wanted(H100, 512)
    found = cost_breakdown(request, make_stage(request, *_drawn(request, 1))).estimates
    least_ns = LAUNCHES_PER_COLLECTIVE * LAUNCH_NS
    activations = [sent for key, sent in found.sends.items() if key.startswith("dgrad")]
    assert activations
    for each in (each for sent in activations for each in sent if each.kind != "slice"):
        assert least_ns * each.count <= each.host_ns <= (least_ns + 2 * LAUNCH_NS) * each.count


@pytest.mark.parametrize("launch_s", [1e-6, 30e-6])
def test_with_its_row_the_plan_is_the_best_of_all(launch_s: float) -> None:
    cluster = behind(parse_cluster("2xH100"), launch_s)
    graph = linear_step(64, 32, 16)
    request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(
        parse_mesh("2", cluster)
    )
    problem = price(request)
    assert all(window.savings[-1].resource == "host" for window in problem.windows)
    solution, best = solve(problem), solve_by_enumeration(problem)
    assert solution.objective == best.objective == evaluate(problem, solution.choice).objective
