"""Where a search takes long, a rough plan that fits comes first. It is the answer if the search is
ended before there is a better one, or if there is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_on
from autopar.driver.search.incumbent import Stopped, Trail
from autopar.driver.search.meshes import meshes_of
from autopar.driver.search.on_mesh import best_on_mesh
from autopar.ir.problem import Solution, Status
from autopar.plans.memory_refinement import Beaten, Candidate
from autopar.plans.provenance import SearchStep
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import PlanRequest, make_graph_request
from autopar.solver.search import silent
from tests.codegen.models import case

COMPILE = importlib.import_module("autopar.compile")
SOLVE = COMPILE.solve
CLUSTER = parse_cluster("2xH100")


@cache
def request_within(limit_bytes: int | None) -> PlanRequest:
    options = Options(mesh="2", memory_limit_bytes=limit_bytes, microbatches=1)
    graph = case("llama").traced.graph
    return make_graph_request(graph, CLUSTER, options).on(meshes_of(CLUSTER, options)[0])


@cache
def request() -> PlanRequest:
    """Of a step whose best plan does not fit."""
    free = best_on(request_within(None), silent)
    return request_within(free.estimates.memory.total * 19 // 20)


def roughly(thorough: Callable[[], None]) -> Callable[..., Solution]:
    """A `solve` whose solutions of problems with a limit are rough where they may be. Before any
    other one, `thorough` is called."""

    def solve(problem: Any, *, rough: bool = False, **how: Any) -> Solution:
        if problem.usage_limit is not None and not rough:
            thorough()
        found = SOLVE(problem, rough=rough, **how)
        if not (rough and found.choice) or problem.usage_limit is None:
            return found
        return replace(found, is_rough=True, status=Status.FEASIBLE, bound=found.bound // 2)

    return solve


@cache
def first_and_best() -> tuple[Candidate, Candidate]:
    """The only rough plan that is reported, and the best plan."""
    heard: list[Candidate] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(COMPILE, "solve", roughly(lambda: None))
        best = best_on(request(), hearing(heard))
    (first,) = heard
    return first, best


def hearing(plans: list[Candidate]) -> Callable[[str], None]:
    def say(text: str) -> None:
        if isinstance(text, SearchStep) and text.plan is not None:
            plans.append(text.plan)

    return say


def test_a_rough_plan_that_fits_comes_before_the_best() -> None:
    first, best = first_and_best()
    assert first.estimates.memory.total <= request().memory_limit_bytes
    assert not first.solution.is_rough
    assert best.solution.objective <= first.solution.objective
    assert best.solution.bound >= first.solution.bound


@pytest.mark.parametrize("is_better", [False, True])
def test_what_is_no_better_than_the_incumbent_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, is_better: bool
) -> None:
    """Nor is it the answer, if nothing is better than it."""
    first, best = first_and_best()
    heard: list[Candidate] = []
    monkeypatch.setattr(COMPILE, "solve", roughly(lambda: None))
    cutoff = first.solution.objective + is_better
    with nullcontext() if is_better else pytest.raises(Beaten):
        found = best_on(request(), hearing(heard), cutoff)
        assert found.solution.objective == best.solution.objective
    assert len(heard) == is_better


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stopped])
def test_a_search_that_is_ended_has_the_rough_plan(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    trail = Trail(silent, stops=True)

    def ended() -> None:
        trail.why = f"{Stopped()}"
        raise error

    monkeypatch.setattr(COMPILE, "solve", roughly(ended))
    found = best_on_mesh(request(), trail)
    assert found.estimates.memory.total <= request().memory_limit_bytes
    assert [each.structure for each in trail.planned] == [found.structure]
    assert [each.result for each in trail.outcomes] == ["planned"]


def test_after_a_plan_that_is_not_rough_and_does_not_fit_the_next_one_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[tuple[bool, bool]] = []

    def solve(problem: Any, *, rough: bool = False, **how: Any) -> Solution:
        found = SOLVE(problem, rough=rough, **how)
        if problem.usage_limit is not None:
            solved.append((rough, found.is_rough))
        return found

    monkeypatch.setattr(COMPILE, "solve", solve)
    best_on(request_within(request().memory_limit_bytes * 12 // 20), silent)
    assert solved[:2] == [(True, False), (True, False)]
