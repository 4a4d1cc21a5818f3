"""Windows as `price` states them for classes, and as `cost_breakdown` adds them up op by op."""

from __future__ import annotations

import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.cost_model.cost_breakdown import cost_breakdown
from autopar.cost_model.price import price
from autopar.plans.decisions import make_stage
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.solver import evaluate
from tests.cost_model.test_price import LIMIT, random_solution
from tests.graphs import linear_step
from tests.planned import on_h100


@pytest.mark.parametrize("mesh", ["4", "2x4", "2x2x2"])
def test_what_windows_hide_is_what_the_bill_says(mesh: str) -> None:
    hidden = 0
    for seed in range(3):
        graph = linear_step(64, 32, 16, layers=4)
        cluster, laid = on_h100(mesh, bucket_bytes=1)
        request = make_graph_request(graph, cluster, Options(memory_limit_bytes=LIMIT)).on(laid)
        problem = price(request)
        solution = random_solution(problem, seed)
        estimates = cost_breakdown(request, make_stage(request, problem, solution)).estimates
        assert problem.windows
        in_windows = sum(estimates.hidden.values())
        found = evaluate(problem, solution.choice)
        assert found.objective == estimates.added_up_ns + estimates.host_ns - in_windows
        hidden += in_windows
    assert hidden > 0


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("cluster", "mesh", "batch"),
    [("2x4xH100", "2x4", 8192), ("2x4xH100", "2x4", 2048), ("8x4xH100", "8x4", 16384)],
)
def test_a_step_is_played_as_it_is_modelled(cluster: str, mesh: str, batch: int) -> None:
    graph, described = linear_step(batch, 4096, 4096, layers=24), parse_cluster(cluster)
    request = make_graph_request(graph, described, Options(mesh=mesh)).on(
        parse_mesh(mesh, described)
    )
    found = best_on(request, lambda _: None).estimates
    assert found.added_up_ns > 1.1 * found.modelled_ns
    assert found.step_ns == pytest.approx(found.modelled_ns, rel=0.03)
