"""No plan has more on the host than a device's share, and it is as good as that allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster.parsing import parse_cluster
from autopar.compile import best_as_stated, best_on
from autopar.cost_model.peak_rows import PeakRows
from autopar.cost_model.price import price
from autopar.driver.planning import answer
from autopar.driver.search.shortage import smallest_memory
from autopar.errors import InfeasibleError, NotImposedWarning
from autopar.ir.graph import Graph
from autopar.ir.peak_candidates import ON_HOST
from autopar.ir.problem import Problem
from autopar.plans.provenance import PROVEN
from autopar.plans.recorded import options_of
from autopar.plans.requests.options import Options
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import (
    GraphRequest,
    PlanRequest,
    make_graph_request,
    with_host_share,
)
from autopar.solver import evaluate, solve
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.driver import test_offload as activations
from tests.driver import test_residency as parameters

FAST = 1000.0
"""GB/s to the host: so much is offloaded."""

SMALL = 200 << 20
"""Bytes of a device's share: less than is offloaded without a limit."""


@cache
def offloading() -> PlanRequest:
    """Within half of the memory that the best plan of all takes."""
    free = best_on(activations.request(FAST), silent).estimates.memory.total
    return activations.request(FAST, free // 2)


@cache
def hosting() -> PlanRequest:
    """Within so little memory that parameters are on the host."""
    free = best_on(parameters.request(27.7), silent).estimates.memory
    return parameters.request(27.7, int(0.66 * free.total))


def with_share(request: PlanRequest, share_bytes: int) -> PlanRequest:
    return replace(request, cluster=with_host_share(request.cluster, share_bytes))


def counted(request: PlanRequest, problem: Problem) -> Problem:
    return PeakRows(request)(problem, {ON_HOST: 0})


@pytest.mark.parametrize("wanted", [offloading, hosting])
def test_the_row_is_what_the_plan_has_there(wanted: Callable[[], PlanRequest]) -> None:
    """Of the problem that is open, and of the settled one."""
    opened = wanted().opened()
    stated = replace(price(opened), usage_limit=opened.memory_limit_bytes)
    found = best_as_stated(opened, stated, silent)
    assert found.estimates.host_bytes == found.estimates.host_memory.total > 0
    choice = solve(stated, tolerance=opened.tolerance).choice
    for own, problem, chosen in (
        (opened, stated, choice),
        (found.request, found.problem, found.solution.choice),
    ):
        with_row = counted(own, problem)
        (time,) = with_row.other_limits
        held = sum(
            int(usage.amounts[c])
            for usages, c in zip(with_row.usages, chosen, strict=True)
            for usage in usages
            if usage.start == time
        )
        assert held == found.estimates.host_bytes


def test_a_plan_is_within_its_share_of_the_host() -> None:
    roomy = best_on(offloading(), silent)
    share = roomy.estimates.host_bytes - 1
    found = best_on(with_share(offloading(), share), silent)
    assert 0 < found.estimates.host_bytes <= share
    assert found.estimates.memory.total <= offloading().memory_limit_bytes
    assert found.solution.objective >= roomy.solution.bound
    assert ON_HOST in found.peak_candidates and ON_HOST not in roomy.peak_candidates


def test_equal_to_the_best_of_all_that_can_be_done() -> None:
    limit = offloading().memory_limit_bytes
    every = list[int]()
    for some in activations.decided(FAST):
        stated = counted(with_share(some, SMALL), replace(price(some), usage_limit=limit))
        every += [found.objective for found in [solve(stated)] if found.choice]
    opened = with_share(offloading(), SMALL).opened()
    stated = counted(opened, replace(price(opened), usage_limit=limit))
    found = solve(stated)
    assert found.objective <= min(every) * (1 + 2 * PROVEN) and found.bound <= min(every)
    assert evaluate(stated, found.choice).feasible


class Wide(nn.Module):
    """Each weight is a bucket, and so each layer a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


@cache
def wide() -> Graph:
    with torch.device("meta"):
        return trace(Wide(), (torch.empty(65536, 4096),), {}).graph


def asked(host_memory: str | None, microbatches: int | None = 1) -> GraphRequest:
    """On the two devices of a node, within less memory than it takes without the host's."""
    given = make_options(
        mesh="2",
        backend="eager",
        memory={"host": host_memory, "limit": 9500 << 20},
        microbatches=microbatches,
    )
    cluster = activations.fast_host(parse_cluster("2xH100"), FAST)
    return make_graph_request(wide(), cluster, given)


def within(wanted: GraphRequest) -> bool:
    held = answer(wanted, silent).estimates
    return held.host_bytes <= wanted.cluster.host.memory_bytes and held.host_memory.total >= 0


def test_what_is_short_of_the_host_is_told_with_what_would_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        answer(asked("1MiB"), silent)
    found = re.search(r"--memory-host (\w+) \(.*--microbatches (\d+) ", str(caught.value))
    assert found is not None, str(caught.value)
    host_memory, count = found[1], int(found[2])
    assert within(asked(host_memory)) and within(asked("1MiB", microbatches=count))
    if count > 2:
        with pytest.raises(InfeasibleError):
            answer(asked("1MiB", microbatches=count // 2), silent)


def test_microbatches_are_looked_for_where_the_host_is_too_small() -> None:
    plan = answer(asked("1MiB", microbatches=None), silent)
    assert plan.structure.microbatches > 1
    assert 2 * plan.estimates.host_bytes <= 1 << 20


def test_the_leanest_plan_is_within_the_share() -> None:
    roomy = smallest_memory(offloading(), silent).estimates
    found = smallest_memory(with_share(offloading(), roomy.host_bytes - 1), silent).estimates
    assert found.host_bytes < roomy.host_bytes and found.memory.total > roomy.memory.total


def test_parameters_that_have_to_be_there_are_in_smaller_shards() -> None:
    """Where all live on the host, or it is told why they cannot."""
    roomy = best_on(parameters.request(27.7, residency="cpu"), silent).estimates
    params = best_on(parameters.request(27.7), silent).structure.params.values()
    steps_bytes = 4 * len(params)  # AdamW counts them in a number of each parameter
    least = 4 * sum(param.num_bytes for param in params) // 2 + steps_bytes
    wanted = with_share(parameters.request(27.7, residency="cpu"), least)
    found = best_on(wanted, silent).estimates
    assert found.host_bytes == least <= roomy.host_bytes
    with pytest.raises(InfeasibleError, match="in its host's memory where its share is"):
        best_on(with_share(wanted, least - 1), silent)


def test_a_node_is_shared_by_its_devices() -> None:
    graph = parameters.traced().graph
    options = make_options(mesh="8", memory={"host": "1TiB"})
    wanted = make_graph_request(graph, parse_cluster("2x4xH100"), options)
    assert wanted.cluster.host.memory_bytes == 2**40 // 4
    assert (
        make_graph_request(graph, parse_cluster("8xH100"), Options()).cluster.host.memory_bytes
        == 256 * 10**9
    )
    with pytest.warns(NotImposedWarning, match="the host of a CPU has no other memory"):
        assert make_graph_request(graph, parse_cluster("4xcpu"), options).cluster == parse_cluster(
            "4xcpu"
        )


def test_what_was_asked_for_is_in_the_plan() -> None:
    plan = answer(asked("64GiB"), silent)
    assert "host memory 64GiB" in plan.provenance.imposed
    assert options_of(plan).host_memory_bytes == 64 << 30
    assert options_of(answer(asked(None), silent)).host_memory_bytes is None


@pytest.mark.parametrize("residency", ["cpu", "cuda"])
def test_the_host_of_a_cpu_has_no_other_memory(residency: str) -> None:
    cluster = parse_cluster("2xcpu")
    cluster = replace(cluster, host=replace(cluster.host, memory_bytes_per_s=1e10, memory_bytes=1))
    options = Options(mesh="2", residency=residency)
    held = answer(make_graph_request(parameters.traced().graph, cluster, options), silent).estimates
    assert held.memory.params > 0 and held.host_bytes == 0
