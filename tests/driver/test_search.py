"""The search over meshes: what it cuts off could not have won."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from autopar.cluster.mesh_shapes import candidate_meshes
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.driver.search import meshes_of, search
from autopar.errors import ClusterError, InfeasibleError
from autopar.ir.problem import Problem, Solution, Status
from autopar.plans.fitting import Beaten
from autopar.plans.options import Options
from autopar.plans.plan import Plan
from autopar.plans.request import ask
from tests.graphs import linear_step


def planned(mesh: str, *, cluster: str = "2x4xH100", heard: list[str] | None = None) -> Plan:
    told = [] if heard is None else heard
    return search(
        ask(linear_step(8192, 8192, 8192, layers=3), parse_cluster(cluster), Options(mesh=mesh)),
        told.append,
    )


@pytest.mark.parametrize(("mesh", "max_axes"), [("auto", 2), ("auto:3", 3), ("auto:1", 1)])
def test_the_best_mesh_wins_and_its_bound_holds_on_all(mesh: str, max_axes: int) -> None:
    heard: list[str] = []
    found = planned(mesh, heard=heard)
    meshes = candidate_meshes(parse_cluster("2x4xH100"), max_axes)
    single = {str(each): planned(str(each)).provenance for each in meshes}
    assert found.provenance.meshes_tried == tuple(single)
    best = min(single, key=lambda each: single[each].objective_ns)
    assert found.structure.mesh == planned(best).structure.mesh
    assert found.provenance.objective_ns == single[best].objective_ns
    assert found.provenance.bound_ns == single[best].objective_ns
    assert found.provenance.status == "optimal"
    cut_off = [text for text in heard if "nothing better" in text]
    assert bool(cut_off) == (max_axes > 1)


def test_meshes_along_the_levels_come_first_then_those_like_them() -> None:
    heard: list[str] = []
    planned("auto", cluster="8x8xH100", heard=heard)
    tried = [text for text in heard if text.startswith("solving for mesh")]
    meshes = [text.removeprefix("solving for mesh ") for text in tried]
    assert meshes[0] == "dp=8,tp=8"
    assert {*meshes[1:3]} == {"dp=4,tp=16", "dp=16,tp=4"}
    assert len(meshes) == len(candidate_meshes(parse_cluster("8x8xH100"), 2))


def test_a_mesh_whose_best_plan_is_no_better_without_a_limit_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the limit its plans hardly take less, though that is not known for sure: what memory
    would do is not looked at."""
    flow = import_module("autopar.compile")
    solve = flow.solve

    def unsure(problem: Problem, *, cutoff: int | None, **how: Any) -> Solution:
        found = solve(problem, **how)
        if not found.choice:
            return found
        return replace(found, status=Status.FEASIBLE, bound=found.bound // 2)

    graph, cluster = linear_step(8192, 8192, 8192, layers=3), parse_cluster("2x4xH100")
    found = planned("dp=2,tp=4")
    peak = found.estimates.memory.total
    options = Options(mesh="dp=2,tp=4", memory_limit_bytes=peak - 2**20)
    request = ask(graph, cluster, options).on(meshes_of(cluster, options)[0])
    heard: list[str] = []
    best = found.provenance.objective_ns
    monkeypatch.setattr(flow, "solve", unsure)
    with pytest.raises(Beaten) as beaten:
        best_on(request, heard.append, best)
    assert beaten.value.bound == best // 2
    assert not any("memory binds" in text for text in heard)
    with pytest.raises(InfeasibleError):
        best_on(request, heard.append, 2 * best)
    assert any("memory binds" in text for text in heard)


@pytest.mark.parametrize("mesh", ["auto:", "auto:x", "auto:4", "auto:0"])
def test_numbers_of_axes_that_cannot_be(mesh: str) -> None:
    with pytest.raises(ClusterError, match="axes"):
        planned(mesh)
