"""What saving adds to kernels: an open problem costs what the step that it is settled to does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.price import price
from autopar.plans.decisions import resolved_request, same_choice
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.solver import evaluate
from tests.cost_model.test_peak_rows import random_solution
from tests.driver.test_recompute import traced


def request(mesh: str) -> PlanRequest:
    cluster = parse_cluster(f"{mesh}xH100")
    asked = make_graph_request(traced().graph, cluster, Options(mesh=mesh))
    return replace(asked.on(parse_mesh(mesh, cluster)), recompute=None)


@pytest.mark.parametrize("mesh", ["1", "2"])
def test_fused_kernels_write_and_read_what_is_saved(mesh: str) -> None:
    wanted = request(mesh)
    problem = price(wanted)
    found: set[tuple[str, ...]] = set()
    for seed in range(12):
        solution = random_solution(problem, seed)
        settled = resolved_request(wanted, problem, solution)
        plain = price(settled)
        choice = same_choice(problem, solution, plain, settled.step)
        cost = evaluate(problem, solution.choice).objective
        assert evaluate(plain, choice).objective == pytest.approx(cost, abs=20)
        found.add(settled.recompute or ())
    assert len(found) > 2
