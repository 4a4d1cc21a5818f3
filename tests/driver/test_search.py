"""The search over meshes: what it cuts off could not have won."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from autopar.cluster.mesh_shapes import candidate_meshes
from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.driver.planning import answer
from autopar.driver.search import meshes as driver
from autopar.driver.search.incumbent import Trail
from autopar.driver.search.meshes import meshes_of
from autopar.errors import ClusterError, InfeasibleError
from autopar.ir.problem import Problem, Solution, Status
from autopar.plans.memory_refinement import Beaten, Candidate
from autopar.plans.plan import Plan
from autopar.plans.requests.options import Options
from autopar.plans.requests.policy import other_thresholds
from autopar.plans.requests.request import PlanRequest, make_graph_request
from tests.graphs import linear_step
from tests.looked import looked_at, named


def planned(
    mesh: str,
    *,
    cluster: str = "2x4xH100",
    rows: int = 8192,
    width: int = 8192,
    heard: list[str] | None = None,
    times: int = 1,
) -> Plan:
    """The plan of three layers, where links between nodes are so many `times` as fast."""
    told = [] if heard is None else heard
    graph, there = linear_step(rows, width, width, layers=3), parse_cluster(cluster)
    outer, *inner = there.levels
    link = replace(outer.link, bytes_per_s=times * outer.link.bytes_per_s)
    there = replace(there, levels=(replace(outer, link=link), *inner))
    return answer(make_graph_request(graph, there, Options(mesh=mesh)), told.append)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("mesh", "max_axes"), [("auto:2", 2), ("auto:3", 3), ("auto:1", 1)])
def test_the_best_mesh_wins_and_its_bound_holds_on_all(mesh: str, max_axes: int) -> None:
    heard: list[str] = []
    found = planned(mesh, heard=heard)
    meshes = candidate_meshes(parse_cluster("2x4xH100"), max_axes)
    single = {str(each): planned(str(each)).provenance for each in meshes}
    assert looked_at(found) == named(*single)
    best = min(single, key=lambda each: single[each].objective_ns)
    assert found.structure.only.mesh == planned(best).structure.only.mesh
    assert found.provenance.objective_ns == single[best].objective_ns
    assert found.provenance.bound_ns == single[best].objective_ns
    assert found.provenance.status == "optimal"
    cut_off = [text for text in heard if "nothing better" in text]
    assert bool(cut_off) == (max_axes > 1)


@pytest.fixture
def many_devices() -> Iterator[None]:
    """Eight are many."""
    with other_thresholds(refined_devices=8):
        yield


@pytest.mark.usefixtures("many_devices")
def test_three_axes_are_found_where_nobody_asks_for_them() -> None:
    found = planned("auto", cluster="4x4xA100", rows=1024)
    best = planned("auto:3", cluster="4x4xA100", rows=1024)
    two = planned("auto:2", cluster="4x4xA100", rows=1024)
    assert len(found.structure.only.mesh.sizes) == 3
    assert found.structure == best.structure
    assert found.provenance.objective_ns < 0.995 * two.provenance.objective_ns


def test_three_axes_are_not_tried_on_few_devices() -> None:
    heard: list[str] = []
    planned("auto", heard=heard)
    assert "solving for mesh dp=2,cp=2,tp=2" not in heard


@pytest.mark.usefixtures("many_devices")
def test_three_axes_are_not_tried_where_those_that_they_refine_are_far_from_the_best() -> None:
    """On four rows a mesh of one axis takes a twelfth less than both of two axes."""
    heard: list[str] = []
    found = planned("auto", rows=4, width=4096, heard=heard)
    assert "solving for mesh dp=4,tp=2" in heard
    assert "solving for mesh dp=2,cp=2,tp=2" not in heard
    assert found.structure == planned("auto:3", rows=4, width=4096).structure


@pytest.mark.usefixtures("many_devices")
@pytest.mark.parametrize("limit", ["memory binds", "many nodes"])
def test_three_axes_are_not_tried_where_each_takes_long(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = driver.best_on_mesh

    def tight(*args: Any, **how: Any) -> Candidate:
        found = made(*args, **{**how, "after": None})
        limited = replace(found.solution, is_limiting=True)
        return replace(found, solution=limited, peak_candidates=("full",))

    heard: list[str] = []
    if limit == "memory binds":
        monkeypatch.setattr(driver, "best_on_mesh", tight)
    with other_thresholds(**({"refined_nodes": 1} if limit == "many nodes" else {})):
        found = planned("auto", heard=heard)
    (skipped,) = (e for e in found.provenance.candidates if e.result == "skipped")
    assert skipped.reason == {"many nodes": "refined_nodes 1"}.get(limit, limit)
    assert "solving for mesh dp=4,tp=2" in heard
    assert "solving for mesh dp=2,cp=2,tp=2" not in heard


@pytest.mark.usefixtures("many_devices")
def test_what_is_not_known_of_three_axes_unasked_is_not_said_of_the_best_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = driver.best_on_mesh

    def unsure(
        request: PlanRequest, say: Trail, cutoff: int | None = None, **how: Any
    ) -> Candidate:
        if len(request.mesh.sizes) < 3:
            return made(request, say, cutoff, **how)
        found = made(request, say, None, **how)
        return replace(found, solution=replace(found.solution, bound=found.solution.bound // 2))

    monkeypatch.setattr(driver, "best_on_mesh", unsure)
    heard: list[str] = []
    found = planned("auto", heard=heard)
    assert "solving for mesh dp=2,cp=2,tp=2" in heard
    assert looked_at(found) == named("dp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=2,cp=2,tp=2")
    assert found.provenance.bound_ns == found.provenance.objective_ns
    better = planned("auto", cluster="4x4xA100", rows=1024).provenance
    assert better.bound_ns < 0.6 * better.objective_ns


@pytest.mark.parametrize(
    ("rows", "times", "first"),
    [
        (64, 1, []),
        (8, 10**4, []),
        (72, 10**4, []),
        (64, 10**4, ["dp=32,tp=2"]),
        (128, 1, ["dp=64"]),
    ],
)
def test_meshes_along_the_levels_come_first_then_those_like_them(
    rows: int, times: int, first: list[str]
) -> None:
    """Before them is the mesh that shards the samples most, evenly and two or more to a rank, and
    nothing else over nodes, if the links between them are fast enough for that."""
    heard: list[str] = []
    planned("auto", cluster="8x8xH100", rows=rows, heard=heard, times=times)
    tried = [text for text in heard if text.startswith("solving for mesh")]
    meshes = [text.removeprefix("solving for mesh ") for text in tried]
    of_two = len(candidate_meshes(parse_cluster("8x8xH100"), 2))
    at = len(first)
    assert meshes[: at + 1] == [*first, "dp=8,tp=8"]
    assert {*meshes[at + 1 : at + 3]} == {"dp=4,tp=16", "dp=16,tp=4"}
    assert all(mesh.count(",") < 2 for mesh in meshes[:of_two])
    assert all(mesh.count(",") == 2 for mesh in meshes[of_two:])


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
    request = make_graph_request(graph, cluster, options).on(meshes_of(cluster, options)[0])
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
