"""How much buckets hold: what the links of their axis ask for, and what plans say of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.collectives import (
    LEAST_BYTES,
    MEMORY_PART,
    SMALL_START_PART,
    START_PART,
    collective_s,
    with_buckets,
)
from autopar.driver.planning import answer
from autopar.ir.mesh import BUCKET_BYTES
from autopar.ir.schedule import Start
from autopar.plans.plan import Plan
from autopar.plans.requests.read_options import make_options
from autopar.plans.requests.request import make_graph_request
from autopar.plans.scheduling.events import schedule
from autopar.solver.search import silent
from tests.graphs import linear_step
from tests.layouts import laid_out


@pytest.mark.parametrize(
    ("cluster", "mesh", "mib"),
    [
        ("8xH100", "8", [25]),
        ("4xcpu", "4", [25]),
        ("8x8xH100", "8x8", [25, 25]),
        ("64x8xH100", "64x8", [100, 25]),
        ("64x8xH100", "512", [800]),
        ("64x8xL4", "512", [200]),
        ("8xL4", "8", [3]),
        ("2x4xcpu", "2x4", [25, 25]),
    ],
)
def test_starts_are_a_small_part_of_buckets_or_memory_binds(
    cluster: str, mesh: str, mib: list[int]
) -> None:
    described = parse_cluster(cluster)
    found = with_buckets(parse_mesh(mesh, described), described.device)
    assert [axis.bucket_bytes >> 20 for axis in found] == mib
    for axis in found:
        size = axis.bucket_bytes
        part = collective_s("all_gather", 0, 0, axis) / collective_s(
            "all_gather", size // axis.size, size, axis
        )
        assert size == LEAST_BYTES or part > SMALL_START_PART / 2
        assert part <= START_PART or 2 * size > MEMORY_PART * described.device.memory_bytes


def test_what_starts_later_has_no_smaller_buckets() -> None:
    described = parse_cluster("2x4xH100")
    mesh = parse_mesh("8", described)
    (axis,) = mesh
    sizes: list[int] = []
    for times in (0, 1, 2, 5, 20, 1000):
        late = replace(axis.crossed, curves=(), start_s=times * 1e-5)
        laid = replace(mesh, axes=(replace(axis, link=late),))
        sizes.append(with_buckets(laid, described.device)[0].bucket_bytes)
    assert sizes == sorted(sizes)
    assert sizes[0] == BUCKET_BYTES < sizes[-1] <= MEMORY_PART * described.device.memory_bytes


def test_a_plan_says_it_and_its_gathers_keep_to_it(tmp_path: Path) -> None:
    graph, cluster = linear_step(4096, 4096, 4096, layers=6), parse_cluster("64x8xH100")
    options = make_options(mesh="512", constraints={"strategy": "fsdp"})
    answer(make_graph_request(graph, cluster, options), silent).save(tmp_path / "plan.json")
    layout = laid_out(graph, Plan.load(tmp_path / "plan.json").structure.only)
    assert layout.mesh[0].bucket_bytes == 800 << 20
    events = schedule(layout).forward
    sent = [event.message.transfers for event in events if isinstance(event, Start)]
    # Six weights of 64 MiB, and what is returned.
    assert [len(each) for each in sent] == [6, 1]
