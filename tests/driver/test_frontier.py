"""More memory never means a longer step, and every plan keeps within its limit, while it runs
too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cluster.parsing import parse_cluster
from autopar.driver.search.frontier import find_frontier
from autopar.errors import AutoparError
from autopar.plans.frontier import Frontier, read_limits
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions, SearchOptions
from autopar.plans.requests.request import GraphRequest, make_graph_request
from autopar.report.html.frontier import frontier_html
from autopar.solver.search import silent
from autopar.tracer import Traced, trace
from tests.codegen.models import case
from tests.codegen.test_microbatches import Tall
from tests.driver.test_recompute import traced
from tests.live_bytes import peak_bytes

MIB = 1 << 20


def step(name: str) -> Traced:
    return case(name).traced if name else traced()


def asked(
    name: str = "", mesh: str = "2", devices: str = "2", limit: int | None = None
) -> GraphRequest:
    options = Options(PlanOptions(backend="eager"), mesh=mesh, memory_limit_bytes=limit)
    return make_graph_request(step(name).graph, parse_cluster(f"{devices}xH100"), options)


@cache
def found(name: str, mesh: str, devices: str) -> Frontier:
    return find_frontier(asked(name, mesh, devices), (), silent)


def small() -> Frontier:
    return found("", "2", "2")


CASES = [
    ("", "2", "2"),
    pytest.param("", "2x2", "4", marks=pytest.mark.nightly),
    pytest.param("", "auto", "4", marks=pytest.mark.nightly),
    pytest.param("gpt2", "2", "2", marks=pytest.mark.nightly),
    pytest.param("llama", "2", "2", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("name", "mesh", "devices"), CASES)
def test_a_step_is_no_longer_for_more_memory(name: str, mesh: str, devices: str) -> None:
    frontier = found(name, mesh, devices)
    plans = [point.plan for point in frontier.points if point.plan is not None]
    assert len(plans) == len(frontier.points) > 1
    assert len({plan.digest for plan in plans}) == len(plans)
    assert plans[-1].estimates.memory.total == frontier.smallest_peak_bytes
    assert name or plans[-1].structure.only.recompute
    check(name, frontier)


@pytest.mark.parametrize(
    ("mesh", "devices"), [("2", "2"), pytest.param("2x2", "4", marks=pytest.mark.nightly)]
)
def test_limits_that_are_given(mesh: str, devices: str) -> None:
    limits = (4 * MIB, 3 * MIB, MIB // 100)
    frontier = find_frontier(asked("", mesh, devices), limits, silent)
    assert tuple(point.limit_bytes for point in frontier.points) == limits
    assert frontier.points[0].plan is not None
    assert frontier.points[2].plan is None
    assert frontier.smallest_peak_bytes > limits[2]
    check("", frontier)


def check(name: str, frontier: Frontier) -> None:
    """Steps rise as limits fall, and all is within the limits, as predicted and as it runs."""
    limits = [point.limit_bytes for point in frontier.points]
    plans = [frontier.unlimited, *(p.plan for p in frontier.points if p.plan is not None)]
    assert limits == sorted(set(limits), reverse=True)
    steps = [plan.estimates.step_ns for plan in plans]
    assert steps == sorted(steps)
    for plan in plans:
        memory = plan.estimates.memory.total
        assert peak_bytes(step(name), plan) <= memory <= plan.estimates.memory_limit


def test_a_page_says_whether_it_fits() -> None:
    frontier = small()
    smallest_memory, text = frontier.summary().plans[-1], str(frontier)
    assert "fits into 74.5 GiB per device, step 1.000 times" in text
    assert smallest_memory.num_recomputed and f"{smallest_memory.num_recomputed} in " in text
    none = replace(frontier, device_bytes=frontier.smallest_peak_bytes - 1)
    assert "does not fit into" in str(none)
    between = replace(frontier, device_bytes=frontier.smallest_peak_bytes)
    assert f"step {smallest_memory.ratio:.3f} times" in str(between)


@pytest.mark.nightly
def test_the_same_bytes_every_time() -> None:
    again = find_frontier(asked(), (), silent)
    assert again == small()
    assert frontier_html(again.summary()) == frontier_html(small().summary())


def test_limits_as_people_write_them() -> None:
    gib = 1 << 30
    assert read_limits("") == read_limits(()) == ()
    assert read_limits("24, 80,40GiB") == (80 * gib, 40 * gib, 24 * gib)
    assert read_limits("1GiB,512MiB") == read_limits([512 << 20, "1GiB", gib]) == (gib, gib // 2)
    for wrong in ("80,40", "80GiB,", "x", "0GiB", [0], [float("inf")]):
        with pytest.raises(AutoparError, match="memory limits: "):
            read_limits(wrong)


def test_microbatches_are_among_the_plans() -> None:
    graph = trace(Tall(), (torch.randn(4096, 16),), {}).graph
    options = Options(PlanOptions(backend="eager"), mesh="1", microbatches=None)
    wanted = make_graph_request(graph, parse_cluster("1xH100"), options)
    found = find_frontier(wanted, (2 << 20, 1 << 20, 700 << 10), silent)
    plans = [point.plan for point in found.points]
    assert [p.structure.microbatches for p in plans if p] == [2, 4, 8]
    assert "8 microbatches" in str(found)


def test_each_plan_has_its_margin_if_that_is_asked_for() -> None:
    """Within the same limit: rivals are on other meshes, or the same one, and fit as well."""
    wanted = asked("", "auto", "2")
    given = PlanOptions(backend="eager", search=SearchOptions(margin=True))
    wanted = replace(wanted, options=replace(wanted.options, given=given))
    found = find_frontier(wanted, (4 * MIB, 3 * MIB), silent)
    plain = find_frontier(asked("", "auto", "2"), (4 * MIB, 3 * MIB), silent)
    for point, same in zip(found.points, plain.points, strict=True):
        assert point.plan is not None and same.plan is not None
        assert point.plan.structure == same.plan.structure
        margin = point.plan.provenance.margin
        assert margin is None or margin.bound_ns >= point.plan.provenance.bound_ns
    assert found.unlimited.provenance.margin is not None
