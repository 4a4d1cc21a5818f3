"""No price falls with more to do or slower hardware, or jumps by more than is said here; and no
faster hardware makes the best plan worse. Of products and attention `test_compute` says the first,
of collectives on links `test_collectives`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster.devices import DEVICES
from autopar.cluster.links import LINKS
from autopar.cluster.mesh_shapes import parse_mesh
from autopar.cluster.parsing import parse_cluster
from autopar.cost_model.collectives import collective_s
from autopar.cost_model.moves import move_ns
from autopar.cost_model.optimizer import update_s
from autopar.cost_model.optimizer_kinds import OPTIMIZERS, find_kind
from autopar.cost_model.price import price
from autopar.cost_model.roofline import attention_s, matmul_s, pointwise_s, stream_s
from autopar.ir.buckets import Sharing
from autopar.ir.graph import Atom, TensorType
from autopar.ir.mesh import Axis, Cluster, Device, Link, Mesh
from autopar.ir.problem import Problem, Solution
from autopar.ir.redistribute import KINDS, step
from autopar.ir.sharding import Sharding
from autopar.plans.requests.options import Options
from autopar.plans.requests.request import make_graph_request
from autopar.rules.op import Scores
from autopar.solver import solve
from autopar.tracer import trace
from tests.cost_model.test_collectives import local_bytes
from tests.graphs import linear_step
from tests.tracer.models import gpt2

ROUNDING = 1 + 1e-12


def sizes(most: int) -> st.SearchStrategy[int]:
    """Whole numbers from 1 to 2**most, of every order of magnitude alike."""
    return st.floats(0, most).map(lambda power: int(2**power))


def grid(most: int, ratio: float) -> list[int]:
    """Whole numbers from 1 to 2**most, each about `ratio` times the one before."""
    return sorted({int(ratio**k) for k in range(int(most * log(2) / log(ratio)) + 1)})


devices = st.sampled_from(tuple(DEVICES.values()))
dtypes = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
amounts = st.floats(0, 1e15)
parts = st.floats(0.05, 1)
times = st.floats(1, 100)
links = st.sampled_from(tuple(LINKS.values()))
kinds = st.sampled_from(KINDS)


def faster(device: Device, memory: float = 1.0, compute: float = 1.0) -> Device:
    flops = tuple((dtype, compute * rate) for dtype, rate in device.flops_per_s)
    rate = memory * device.memory_bytes_per_s
    return replace(device, flops_per_s=flops, memory_bytes_per_s=rate)


def causal(rows: int, keys: int, head_dim: int) -> tuple[float, Scores]:
    return 2.0 * rows * keys * head_dim, Scores(rows, keys, head_dim, 4.0, True, False)


@given(devices, dtypes, *[amounts] * 3, st.integers(1, 10**6), st.integers(1, 10**6), parts, times)
def test_no_kernel_takes_longer_on_a_faster_device(
    device: Device,
    dtype: str,
    out: float,
    depth: float,
    moved: float,
    rows: int,
    keys: int,
    part: float,
    times: float,
) -> None:
    def taken(on: Device) -> list[float]:
        return [
            matmul_s(out, depth, moved, dtype, on),
            attention_s(*causal(rows, keys, 64), moved, dtype, on),
            stream_s(moved, on, part),
            pointwise_s(moved, on, part, starts=True),
        ]

    before = taken(device)
    for quick in (faster(device, memory=times), faster(device, compute=times)):
        assert all(a <= b * ROUNDING for a, b in zip(taken(quick), before, strict=True))


@given(devices, amounts, st.floats(0, 1e9), parts, st.booleans())
def test_pointwise_ops_take_as_much_longer_as_what_they_move(
    device: Device, moved: float, more: float, part: float, starts: bool
) -> None:
    rise = pointwise_s(moved + more, device, part, starts=starts) - pointwise_s(
        moved, device, part, starts=starts
    )
    at_most = more / (part * device.memory_bytes_per_s)
    slack = 1e-12 * pointwise_s(moved, device, part, starts=starts)
    assert -slack <= rise <= at_most * ROUNDING + slack


@given(devices, sizes(20), sizes(20), st.integers(1, 256))
def test_attention_does_not_jump(device: Device, rows: int, keys: int, head_dim: int) -> None:
    """Of a row or a key more, or some hundred: as many parts more as there are more of them."""

    def seconds(rows: int, keys: int) -> float:
        flops, scores = causal(rows, keys, head_dim)
        return attention_s(flops, scores, 2 * (rows + keys) * head_dim, "bfloat16", device)

    before = seconds(rows, keys)
    for more in range(1, 129):
        for after, part in (
            (seconds(rows + more, keys), more / rows),
            (seconds(rows, keys + more), more / keys),
        ):
            assert before * (1 - 1e-12) <= after <= before * (1 + part) * ROUNDING


@given(kinds, st.sampled_from([2, 3, 8, 48]), st.sampled_from([1, 2, 8]), links)
def test_measured_collectives_rise_without_jumps(
    kind: str, sides: int, shared: int, link: Link
) -> None:
    """Laws with a root, and the least of several, are concave: each byte costs no more than the one
    before."""
    n = sides * shared
    on = Axis("dp", n, link, shared, LINKS["NVLink 4"] if shared > 1 else None)
    shards = [0, *grid(33, 1.2)]
    seconds = [collective_s(kind, *local_bytes(kind, shard * n, n), on) for shard in shards]
    slopes = [
        (after - before) / (large - small)
        for (small, large), (before, after) in zip(pairwise(shards), pairwise(seconds), strict=True)
    ]
    # What a few bytes cost is lost in the digits of the start.
    least = 1e-14 * seconds[0]
    assert all(slope >= -least for slope in slopes)
    assert all(after <= before * (1 + 1e-6) + least for before, after in pairwise(slopes))


@given(kinds, st.integers(2, 64), st.integers(0, 2**30), links, times)
def test_sooner_starts_never_cost_more(
    kind: str, n: int, shard: int, link: Link, times: float
) -> None:
    curves = tuple(replace(curve, start_s=curve.start_s / times) for curve in link.curves)
    quick = replace(
        link, latency_s=link.latency_s / times, start_s=link.start_s / times, curves=curves
    )
    slow_s, quick_s = (
        collective_s(kind, *local_bytes(kind, shard * n, n), Axis("dp", n, each))
        for each in (link, quick)
    )
    assert quick_s <= slow_s * ROUNDING


ROUTES = (
    ("[S(0)]", "[R]"), ("[P]", "[R]"), ("[P]", "[S(0)]"), ("[S(0)]", "[S(1)]"), ("[R]", "[S(0)]"),
)  # fmt: skip


def columns(elements: int) -> tuple[TensorType, tuple[Atom, ...]]:
    return TensorType("bfloat16", (8, 8 * elements), ((0,), (1,))), (
        Atom(8, "rows", True), Atom(8 * elements, "columns", True),
    )  # fmt: skip


@pytest.mark.parametrize("members", [0, 1, 64], ids=str)
@pytest.mark.parametrize("route", ROUTES, ids=" to ".join)
def test_larger_tensors_never_move_sooner(route: tuple[str, str], members: int) -> None:
    """But that one which fills a bucket travels alone, and is not copied into it and out of it."""
    cluster = parse_cluster("8xH100")
    mesh, device = parse_mesh("8", cluster), cluster.device
    source, target = map(Sharding.parse, route)
    sharing = Sharing(2**32, members) if members else None
    bucket = mesh.axes[0].bucket_bytes

    def ns(elements: int) -> int:
        tensor, atoms = columns(elements)
        move = step(tensor, atoms, source, target)
        assert move is not None
        where = tensor, atoms, source, target, move, mesh, device
        return move_ns(*where, sharing=sharing)[0]

    for small, large in pairwise(grid(31, 1.05)):
        fills = columns(small)[0].num_bytes < bucket <= columns(large)[0].num_bytes
        copied_s = stream_s(4 * bucket, device) if fills and members else 0.0
        assert ns(small) <= ns(large) + 1e9 * copied_s


@given(
    st.sampled_from(sorted(OPTIMIZERS)), sizes(20), sizes(20),
    st.sampled_from(["[R]", "[S(0)]", "[S(1)]"]), times,
)  # fmt: skip
def test_updates_rise_without_jumps(
    name: str, few: int, more: int, storage: str, times: float
) -> None:
    """A chunk more, of 65,536 elements, is 1/320 of a launch of each kernel more."""
    cluster = parse_cluster("8xH100")
    mesh, optimizer = parse_mesh("8", cluster), find_kind(name)

    def seconds(elements: int, device: Device) -> float:
        tensor, atoms = columns(elements)
        return update_s(optimizer, tensor, atoms, Sharding.parse(storage), mesh, device)

    device = cluster.device
    before, after = seconds(few, device), seconds(few + more, device)
    assert before <= after * ROUNDING
    passes, kernels = optimizer.passes(device.kind)
    if not optimizer.whole:
        new = 64 * more
        chunks = new / 65_536 + 1
        launches_s = kernels * device.kernels.start_s * chunks / 320
        at_most = stream_s(2 * passes * new, device) + launches_s
        assert after - before <= at_most * ROUNDING
    for quick in (faster(device, memory=times), faster(device, compute=times)):
        assert seconds(few, quick) <= before * ROUNDING


def costs(problem: Problem) -> dict[tuple[str, str], int]:
    """Of every choice of every node."""
    return {
        (key, str(label)): cost
        for key, labels, prices in zip(problem.keys, problem.labels, problem.costs, strict=True)
        for label, cost in zip(labels, prices.tolist(), strict=True)
    }


@pytest.mark.nightly
def test_no_choice_of_a_model_gets_cheaper_with_more_sequences_or_slower_devices() -> None:
    """All ops of a step of GPT-2, in every way."""
    cluster = parse_cluster("2x4xH100")
    found: list[dict[tuple[str, str], int]] = []
    for batch, device in (
        (16, faster(cluster.device, 2, 2)), (16, cluster.device), (64, cluster.device),
        (4096, cluster.device),
    ):  # fmt: skip
        ids = torch.zeros((batch, 16), dtype=torch.int64)
        graph = trace(gpt2(), (), {"input_ids": ids, "labels": ids}).graph
        on = replace(cluster, device=device)
        problem = price(make_graph_request(graph, on, Options()).on(parse_mesh("2x4", on)))
        found.append(costs(problem))
    for cheaper, dearer in pairwise(found):
        assert cheaper.keys() == dearer.keys() and len(cheaper) > 1000
        fallen = {which: ns for which, ns in dearer.items() if ns < cheaper[which]}
        assert not fallen


@cache
def solved(cluster: Cluster, mesh: Mesh, batch: int) -> Solution:
    graph = linear_step(batch, 1024, 512, layers=3)
    return solve(price(make_graph_request(graph, cluster, Options()).on(mesh)))


def with_rates(cluster: Cluster, by_level: tuple[float, float]) -> Cluster:
    levels = tuple(
        replace(level, link=replace(level.link, bytes_per_s=times * level.link.bytes_per_s))
        for level, times in zip(cluster.levels, by_level, strict=True)
    )
    return replace(cluster, levels=levels)


@settings(max_examples=10)
@given(
    st.sampled_from(["2x4xH100", "4x2xL4"]), st.sampled_from([64, 1024, 16384]),
    st.sampled_from(["outer", "inner", "memory", "compute"]), st.sampled_from([1.1, 2, 30]),
)  # fmt: skip
def test_faster_hardware_makes_no_best_plan_worse(
    name: str, batch: int, what: str, times: float
) -> None:
    """With the same buckets, which are as large as their start on a link asks for."""
    cluster = parse_cluster(name)
    size = "x".join(str(level.size) for level in cluster.levels)
    quick = with_rates(
        replace(
            cluster,
            device=faster(
                cluster.device,
                memory=times if what == "memory" else 1.0,
                compute=times if what == "compute" else 1.0,
            ),
        ),
        (times if what == "outer" else 1.0, times if what == "inner" else 1.0),
    )
    mesh, quick_mesh = (parse_mesh(size, each) for each in (cluster, quick))
    buckets = Mesh(
        tuple(
            replace(axis, bucket_bytes=same.bucket_bytes)
            for axis, same in zip(quick_mesh, mesh, strict=True)
        )
    )
    before, after = solved(cluster, mesh, batch), solved(quick, buckets, batch)
    assert after.bound <= before.objective
    assert after.objective <= before.objective * 1.001
