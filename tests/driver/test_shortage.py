"""Where nothing fits, the error says what is missing, what holds it, and what really would do."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.driver.planning import answer
from autopar.driver.search.shortage import smallest_memory, with_smaller_batch
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.units import format_bytes, parse_bytes
from autopar.plans.memory_refinement import Candidate
from autopar.plans.requests.options import Options
from autopar.plans.requests.plan_options import PlanOptions
from autopar.plans.requests.request import GraphRequest, PlanRequest, make_graph_request
from autopar.solver.search import silent
from autopar.tracer import trace
from tests.driver.test_recompute import Block, Blocks, request
from tests.driver.test_segments import Chain
from tests.driver.test_segments import asked as chain_asked
from tests.report.plans import MIB

BATCH = 4096


@cache
def graph(batch: int = BATCH) -> Graph:
    return trace(Blocks(Block), (torch.randn(batch, 64),), {}).graph


def asked(limit: int | str, devices: int = 2, batch: int = BATCH) -> GraphRequest:
    limit_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
    options = Options(
        PlanOptions(backend="eager"),
        mesh=str(devices),
        memory_limit_bytes=limit_bytes,
        microbatches=1,
    )
    return make_graph_request(graph(batch), parse_cluster(f"{devices}xH100"), options)


def lean(of: Graph) -> Candidate:
    wanted: PlanRequest = request()
    return smallest_memory(replace(wanted, graph=of), silent)


@cache
def told() -> str:
    with pytest.raises(InfeasibleError) as caught:
        answer(asked(5 * MIB), silent)
    return str(caught.value)


def test_what_is_missing_and_what_holds_it() -> None:
    memory = lean(graph()).estimates.memory
    text = told()
    assert f"peaks at {format_bytes(memory.total)} per device" in text
    assert f"{format_bytes(memory.total - 5 * MIB)} is missing" in text
    for holder, size in (
        ("parameters", memory.params),
        ("optimizer states", memory.optimizer),
        ("activations saved for backward", memory.saved),
        ("all else that is live", memory.transient),
    ):
        assert f"{holder} {format_bytes(size)}" in text
    assert re.search(r"for backward [\d.]+ MiB \(.*layers\.\*: add 1 MiB", text)


def remedies() -> tuple[str, int, int]:
    """The limit, the number of devices and the batch that would do."""
    found = re.search(
        r"would do: --memory-limit (\w+); (\d+) of these devices .*; a batch of (\d+) instead of "
        rf"{BATCH} ",
        told(),
    )
    assert found is not None
    return found[1], int(found[2]), int(found[3])


def test_each_of_what_would_do_does() -> None:
    limit, devices, batch = remedies()
    for each in (
        asked(limit),
        asked(5 * MIB, devices=devices),
        asked(5 * MIB, batch=batch),
    ):
        found = answer(each, silent).estimates
        assert found.memory.total <= found.memory_limit


def test_the_leanest_plan_would_not_fit_on_half_the_devices_or_with_twice_the_batch() -> None:
    _, devices, batch = remedies()
    for each in (asked(5 * MIB, devices=devices // 2), asked(5 * MIB, batch=2 * batch)):
        on_mesh = each.on(parse_mesh(str(each.cluster.num_devices), each.cluster))
        assert smallest_memory(on_mesh, silent).estimates.memory.total > 5 * MIB


def test_a_smaller_batch_is_as_if_it_were_traced() -> None:
    smaller = with_smaller_batch(graph(), 4)
    assert smaller is not None
    smaller.check()
    assert lean(smaller).estimates.memory == lean(graph(BATCH // 4)).estimates.memory
    assert with_smaller_batch(graph(), BATCH) is with_smaller_batch(graph(), 3) is None


def test_no_batch_does_where_states_are_too_large() -> None:
    with pytest.raises(InfeasibleError, match=r"would do: --memory-limit \w+") as caught:
        answer(asked("700KiB"), silent)
    assert "a batch" not in str(caught.value)


def test_on_one_device() -> None:
    with pytest.raises(
        InfeasibleError, match=r"^mesh of one device: .*; \d+ of these devices \(mesh"
    ):
        answer(asked(5 * MIB, devices=1), silent)


def test_what_was_looked_for_unasked_is_named() -> None:
    assert "Looked for" not in told() and "--microbatches" in told()
    wanted = asked("16KiB", batch=16)
    is_open = {
        "mesh": "auto",
        "microbatches": None,
        "stages_if_needed": True,
        "residency_if_needed": True,
    }
    everything = "microbatches, stages and parameters on the host, and none fit$"
    with pytest.raises(InfeasibleError, match=everything) as caught:
        answer(replace(wanted, options=replace(wanted.options, **is_open)), silent)
    assert "--microbatches" not in str(caught.value)
    assert "--memory-residency" not in str(caught.value)


def test_stages_are_told_how_many_microbatches_would_do() -> None:
    """Of those, as of all that is named, the fewest."""
    graph = trace(Chain([64] * 5, 3), (torch.randn(1 << 13, 64),), {}).graph

    def staged(count: int, limit: int | None) -> GraphRequest:
        return chain_asked(graph, 2, stages=2, microbatches=count, memory_limit=limit)

    limit = answer(staged(8, None), silent).estimates.memory.total // 2
    with pytest.raises(InfeasibleError) as caught:
        answer(staged(1, limit), silent)
    found = re.search(r"What would do: --microbatches (\d+) ", str(caught.value))
    assert found is not None, str(caught.value)
    count = int(found[1])
    assert answer(staged(count, limit), silent).estimates.memory.total <= limit
    with pytest.raises(InfeasibleError):
        answer(staged(count // 2, limit), silent)
